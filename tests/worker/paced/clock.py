"""A clock that only sleeping moves."""

from plexrl.worker.training.paced.pacer import Pacer


class Clock:
    """Records the sleeps that were asked for."""

    def __init__(self, *, late_s: float = 0.0) -> None:
        """Each sleep ends `late_s` late."""
        self.now_s = 0.0
        self.sleeps: list[float] = []
        self._late_s = late_s

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now_s += seconds + self._late_s

    def pacer(self, scale: float = 1.0) -> Pacer:
        return Pacer(scale, sleep=self.sleep, clock=self)
