"""How long generation and training took in each step, without the time for which they waited."""

from plexrl.rollout.policies.streaming.elastic import StepTimes


class StageClock:
    """Adds up the time in which each stage is busy. Times never decrease."""

    def __init__(self) -> None:
        self._at: float | None = None
        """None: no step has begun."""
        self._generates = False
        self._trains = True
        self._generation_s = 0.0
        self._training_s = 0.0

    def note(
        self, now: float, *, generates: bool | None = None, trains: bool | None = None
    ) -> None:
        """What each stage does from now on; None: the same as before."""
        if self._at is not None:
            self._generation_s += (now - self._at) * self._generates
            self._training_s += (now - self._at) * self._trains
            self._at = now
        if generates is not None:
            self._generates = generates
        if trains is not None:
            self._trains = trains

    def begin_step(self, now: float) -> StepTimes | None:
        """A step begins; returns the times of the one before. None: it is the first one."""
        self.note(now)
        ended = None
        if self._at is not None:
            ended = StepTimes(generation_s=self._generation_s, training_s=self._training_s)
        self._at = now
        self._generation_s = self._training_s = 0.0
        return ended
