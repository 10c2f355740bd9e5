"""Bursts: the runs of a deployment on its group, one after another, without a long pause."""

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class Burst:
    """The burst of a deployment that is under way, and the last one that ended."""

    started_at: float | None = None
    """None: no burst is under way."""
    tokens: int = 0
    """Tokens of the burst's first operation, known before the rest of the burst is submitted."""
    served: int = 0
    """Operations of the burst that were started."""
    cut_s: float = 0.0
    """Seconds of the parts that were cut off, for others that waited, since the controller last
    paused; 0: none was."""
    part_s: float = 0.0
    """Seconds of the last of these parts."""
    ended_at: float | None = None
    """End of the last burst; None before the first has ended."""
    served_at: float = 0.0
    """When an operation was last started."""
    idle_since: float | None = None
    """When the last run ended or the state was loaded; None while something runs."""
    stepped_at: float | None = None
    """End of an optimizer step, until more than a checkpoint follows it; None: none was made."""
    wants_since: float | None = None
    """Since when an operation has waited for the group; None: none waits."""

    def begin(self, now: float) -> None:
        """Start a burst, or measure the length of the present one from `now`."""
        self.started_at = now

    def cut(self, now: float) -> None:
        """The part of the burst until `now` is over: others wait. The next one begins, if the
        holder goes first again."""
        if self.started_at is not None and now > self.started_at:
            self.part_s = now - self.started_at
            self.cut_s += self.part_s
        self.started_at = now

    def begin_loaded(self, now: float) -> None:
        """The state was loaded for operations that wait."""
        self.started_at = self.idle_since = now

    def stay_over(self) -> None:
        """The state was loaded, and no operation waits."""
        self.started_at = self.idle_since = None

    def serve(self, tokens: int, now: float) -> None:
        """An operation is started."""
        if self.started_at is None:
            self.started_at = now
        if self.tokens == 0:
            self.tokens = tokens
        self.idle_since = None
        self.served += 1
        self.served_at = now

    def step(self, now: float) -> None:
        """An optimizer step has ended."""
        self.stepped_at = now

    def follow_step(self) -> None:
        """The next operation after an optimizer step is started."""
        self.stepped_at = None

    def pause(self, now: float) -> None:
        """Note that no operation runs now, and that more may follow."""
        self.idle_since = now

    def forget_pause(self) -> None:
        """Count no pause since the last run: a snapshot runs, or the cycle is over."""
        self.idle_since = None

    def end(self, now: float) -> float | None:
        """End the burst, because the controller pauses.

        Returns:
            Its length in seconds, with the parts cut off before; None if it ran nothing.
        """
        started_at, length_s = self.started_at, None
        if started_at is not None and started_at <= self.served_at:
            ended_at = self.idle_since if self.idle_since is not None else now
            self.ended_at = ended_at
            length_s = max(0.0, ended_at - started_at) + self.cut_s
            self.cut_s = 0.0
        self.started_at = None
        self.tokens = self.served = 0
        return length_s

    def suspend(self, now: float) -> None:
        """Others get the group; operations of the burst are left."""
        started_at = self.started_at
        if started_at is not None and started_at <= self.served_at:
            self.cut(now)
        if started_at is not None and (self.ended_at is None or self.ended_at < self.served_at):
            self.ended_at = self.idle_since if self.idle_since is not None else now
        self.started_at = None

    def begin_anew(self) -> None:
        """The controller paused after the burst was cut: what begins now is another burst."""
        self.cut_s = 0.0
        self.tokens = self.served = 0

    def interrupt(self) -> None:
        """The processes are gone. The burst counts as none, with the parts that were cut off."""
        self.started_at = self.idle_since = None
        self.cut_s, self.served = 0.0, 0

    def want(self, now: float) -> None:
        """An operation waits for the group."""
        self.wants_since = now

    def stop_wanting(self) -> None:
        """An operation runs, or none waits."""
        self.wants_since = None
