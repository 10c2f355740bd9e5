"""What must, and what may, be stored: the soak's oracle. It shares no code with the store."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Shelf:
    """Versions of one kind of one rank, by seq."""

    must: set[int] = field(default_factory=set)
    """Complete, and nobody has asked to give them up."""
    may: set[int] = field(default_factory=set)
    """Those, and what was being stored or given up when something was killed."""

    @property
    def newest(self) -> int:
        """0: there is none."""
        return max(self.must, default=0)

    def begins(self, seq: int, keep: set[int]) -> None:
        """A version is being stored, and others than `keep` are given up once it is."""
        self.must &= keep
        self.may |= {seq}

    def ends(self, seq: int, keep: set[int], maybe: set[int] | None = None) -> None:
        """It was acknowledged; `maybe` absent: nothing but `keep` may still be there beside it."""
        self.must = (self.must & keep) | {seq}
        self.may = (self.may & (keep if maybe is None else maybe)) | {seq}

    def clears(self) -> None:
        """All are being given up."""
        self.must = set()

    def cleared(self) -> None:
        """That was acknowledged."""
        self.must, self.may = set(), set()

    def found(self, there: set[int]) -> None:
        """Every one that may be there was looked for."""
        assert self.must <= there <= self.may, (self.must, there, self.may)
        self.must, self.may = set(there), set(there)
