"""When the last context switch for a deployment began and ended."""

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class SwitchTimes:
    """The last context switch for a deployment, the offload of the former holder included."""

    began_at: float | None = None
    ended_at: float | None = None
    """None while the switch is under way."""

    def begin(self, now: float) -> None:
        """GPUs are being cleared for the deployment, or its state is being loaded."""
        if self.began_at is None or self.ended_at is not None:
            self.began_at = now
            self.ended_at = None

    def end(self, now: float) -> None:
        """Its state is on the GPUs, or the switch was called off."""
        if self.began_at is not None and self.ended_at is None:
            self.ended_at = now

    def seconds_since(self, since: float) -> float:
        """Seconds of the switch after `since`; 0 while it is under way."""
        began_at, ended_at = self.began_at, self.ended_at
        if began_at is None or ended_at is None:
            return 0.0
        if since < began_at:
            since = began_at
        return ended_at - since if ended_at > since else 0.0
