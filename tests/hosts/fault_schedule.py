"""A schedule of faults: the same seed, duration and hosts give the same schedule."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

CUT_S = 20.0
REBOOT_S = 8.0
HEAD_PARTS = ("plexrl.scheduler", "plexrl.router", "supervisor")
NODE_PARTS = ("plexrl.statemanager", "plexrl.worker", "rank", "supervisor")
KILL = "kill -9"
CUT = "cut"
CUT_ONE_WAY = "cut one way"
REBOOT = "power cut and restart"
LOSE = "loss for good"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault, at a time in seconds from the start."""

    at_s: float
    what: str
    host: str
    target: str = ""
    """The killed part, or the host at the other end of a cut link."""
    index: int = 0
    """Which of several ranks is killed."""

    def __str__(self) -> str:
        return f"{self.at_s:7.1f} s  {self.what}: {self.host} {self.target}".rstrip()


def schedule(seed: int, duration_s: float, head: str, nodes: Sequence[str]) -> list[Fault]:
    """Rounds of all faults, each round in an order of its own, at random moments of `duration_s`
    seconds; one node is lost for good in the last half, and has no fault afterwards."""
    chance = random.Random(f"{seed} {duration_s} {head} {nodes}")
    kinds = len(_round(chance, head, nodes))
    rounds = max(1, round(duration_s / (kinds * CUT_S)))
    drawn = [each for _ in range(rounds) for each in _round(chance, head, nodes)]
    step_s = duration_s / len(drawn)
    found = [
        Fault(at_s=(number + chance.random()) * step_s, what=what, host=host, target=target)
        for number, (what, host, target) in enumerate(drawn)
    ]
    lost_at_s = duration_s * chance.uniform(0.5, 0.8)
    lost = chance.choice(list(nodes))
    kept = [each for each in found if each.at_s < lost_at_s or lost not in (each.host, each.target)]
    kept.append(Fault(at_s=lost_at_s, what=LOSE, host=lost))
    return sorted(kept, key=lambda fault: fault.at_s)


def _round(chance: random.Random, head: str, nodes: Sequence[str]) -> list[tuple[str, str, str]]:
    """Every part once, every link once, links in one direction, and a restart of a node."""
    found = [(KILL, head, part) for part in HEAD_PARTS]
    found += [(KILL, chance.choice(list(nodes)), part) for part in NODE_PARTS]
    found += [(CUT, a, b) for a, b in combinations((head, *nodes), 2)]
    for _ in range(2):
        a, b = chance.sample([head, *nodes], 2)
        found.append((CUT_ONE_WAY, a, b))
    found.append((REBOOT, chance.choice(list(nodes)), ""))
    chance.shuffle(found)
    return found
