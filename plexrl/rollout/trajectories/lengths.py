"""Lengths of responses: the expected ones by prompt, and the latest ones."""

from dataclasses import dataclass, field

from plexrl.rollout.trajectories.record import SampleGroupId

RECENT_MAX = 1024
"""Latest responses of which the lengths are kept."""


@dataclass(slots=True, kw_only=True)
class Lengths:
    """Its size is bounded by what is in flight."""

    expected: dict[SampleGroupId, int] = field(default_factory=dict)
    """Tokens of a response to each prompt in flight for which they were predicted."""
    recent: list[int] = field(default_factory=list)
    """Tokens of the latest complete responses, the latest one last."""

    def expect(self, group: SampleGroupId, tokens: int) -> None:
        """A prompt has this expected length; 0: it is not known."""
        if tokens:
            self.expected[group] = tokens

    def generated(self, tokens: int) -> None:
        """A response is complete."""
        self.recent.append(tokens)
        del self.recent[:-RECENT_MAX]

    def forget(self, group: SampleGroupId) -> None:
        """A prompt is not in flight any more."""
        self.expected.pop(group, None)
