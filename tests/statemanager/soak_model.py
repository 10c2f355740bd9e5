"""The soak's oracle: versions that must and may be stored. It shares no code with the store."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Shelf:
    """Versions of one kind of one rank, by sequence number."""

    must: set[int] = field(default_factory=set)
    """Complete versions that were not dropped."""
    may: set[int] = field(default_factory=set)
    """These, and versions whose save or drop was interrupted by a kill."""

    @property
    def newest(self) -> int:
        """The newest complete version; 0: none."""
        return max(self.must, default=0)

    def begins(self, seq: int, keep: set[int]) -> None:
        """Record the start of a save; versions other than `keep` are dropped when it completes."""
        self.must &= keep
        self.may |= {seq}

    def ends(self, seq: int, keep: set[int], maybe: set[int] | None = None) -> None:
        """Record the end of a save; `maybe` absent: only `keep` may remain in addition."""
        self.must = (self.must & keep) | {seq}
        self.may = (self.may & (keep if maybe is None else maybe)) | {seq}

    def clears(self) -> None:
        """Record the start of a release."""
        self.must = set()

    def cleared(self) -> None:
        """Record the end of a release."""
        self.must, self.may = set(), set()

    def found(self, there: set[int]) -> None:
        """Record the result of a search for all possible versions."""
        assert self.must <= there <= self.may, (self.must, there, self.may)
        self.must, self.may = set(there), set(there)
