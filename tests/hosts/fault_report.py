"""The table of a run of faults: what was planned, what took effect, what the jobs did meanwhile."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tests.hosts.fault_schedule import CUT, KILL, REBOOT, Fault
from tests.hosts.injector import Outcome


@dataclass(slots=True)
class FaultReport:
    """What one run of faults has shown."""

    seed: int
    duration_s: float
    head: str
    outcomes: Sequence[Outcome] = ()
    steps: dict[str, int] = field(default_factory=dict)
    """Steps that each job made between the first fault and the end of the last."""
    operations: int = 0
    """Accepted operations."""
    resent: int = 0
    """Submissions of them that were repeated for want of an answer."""
    runs: int = 0
    """Of an operation on one rank."""
    failure: str = "the run did not end"
    """Empty: every check held."""

    def kind(self, fault: Fault) -> str:
        """What is counted together: a part, a link, restarts of the head, restarts of nodes."""
        if fault.what == KILL:
            where = "head" if fault.host == self.head else "node"
            return f"{fault.what} {fault.target} ({where})"
        if fault.what == CUT:
            return f"{fault.what} {fault.host}-{fault.target}"
        if fault.what == REBOOT:
            return f"{fault.what} ({'head' if fault.host == self.head else 'node'})"
        return fault.what

    def counts(self) -> dict[str, tuple[int, int]]:
        """(planned, took effect) of each kind of fault in the schedule."""
        planned = Counter(self.kind(each.fault) for each in self.outcomes)
        done = Counter(self.kind(each.fault) for each in self.outcomes if each.at_s is not None)
        return {kind: (count, done[kind]) for kind, count in sorted(planned.items())}

    def check_effects(self) -> None:
        """Every kind of fault took effect at least once, and every job made steps meanwhile."""
        idle = [kind for kind, (_, done) in self.counts().items() if not done]
        assert not idle, f"took no effect: {idle}"
        stuck = [name for name, count in self.steps.items() if not count]
        assert not stuck, f"made no step while faults happened: {stuck}"

    def text(self) -> str:
        """The faults in order, then counts."""
        rows = [f"seed {self.seed}, faults in {self.duration_s:g} s", "", *self._faults()]
        rows += ["", f"{'kind of fault':42}{'planned':>10}{'took effect':>14}"]
        for kind, (planned, done) in self.counts().items():
            rows.append(f"{kind:42}{planned:10}{done:14}")
        rows += ["", f"{'job':42}{'steps while faults happened':>30}"]
        rows += [f"{name:42}{count:30}" for name, count in self.steps.items()]
        rows += ["", f"{self.operations} operations accepted, {self.resent} of them sent again"]
        rows.append(f"{self.runs} runs of an operation on a rank")
        rows.append(self.failure or "none lost, none doubled, one holder, equal final weights")
        return "\n".join(rows)

    def _faults(self) -> list[str]:
        rows = [f"{'planned':>10}{'happened':>10}{'steps':>7}  fault"]
        for each in self.outcomes:
            happened = "never" if each.at_s is None else f"{each.at_s:.1f} s"
            fault = each.fault
            what = f"{fault.what}: {fault.host} {fault.target}".rstrip()
            rows.append(f"{fault.at_s:8.1f} s{happened:>10}{each.steps:7}  {what}; {each.effect}")
        return rows


def made(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """Steps that each job made in between."""
    return {name: count - before[name] for name, count in after.items()}
