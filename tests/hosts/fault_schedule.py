"""A schedule of faults: the same seed, duration and hosts give the same schedule."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

CUT_S = 20.0
REBOOT_S = 8.0
SLOT_S = 50.0
"""Mean time between two faults."""
QUIET_SHARE = 0.6
"""Of a slot: its fault happens in the rest, so that trainers make steps between two faults, also
after a link was cut for `CUT_S`."""
RANK = "rank"
SUPERVISOR = "supervisor"
"""Parts that are not named by their module."""
KILL = "kill -9"
CUT = "cut"
CUT_ONE_WAY = "cut one way"
REBOOT = "power cut and restart"
LOSE = "loss for good"


@dataclass(frozen=True, slots=True)
class Parts:
    """What may be killed on the head and on nodes."""

    head: tuple[str, ...] = ("plexrl.scheduler", "plexrl.router", SUPERVISOR)
    node: tuple[str, ...] = ("plexrl.statemanager", "plexrl.worker", RANK, SUPERVISOR)


PLAIN = Parts()


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault, at a time in seconds from the start."""

    at_s: float
    what: str
    host: str
    target: str = ""
    """The killed part, or the host at the other end of a cut link."""

    def __str__(self) -> str:
        return f"{self.at_s:7.1f} s  {self.what}: {self.host} {self.target}".rstrip()


def schedule(
    seed: int, duration_s: float, head: str, nodes: Sequence[str], parts: Parts = PLAIN
) -> list[Fault]:
    """As many faults as `duration_s` has slots, at random moments in them. They are drawn in rounds
    of all faults, each round in an order of its own. One node is lost for good in the last half,
    and has no fault afterwards."""
    chance = random.Random(f"{seed} {duration_s} {head} {nodes}")
    count = max(2, int(duration_s / SLOT_S))
    lost = chance.choice(list(nodes))
    lost_after = min(count - 1, int(count * chance.uniform(0.5, 0.8)))
    drawn: list[tuple[str, str, str]] = []
    while len(drawn) < lost_after:
        drawn += _round(chance, head, nodes, parts)
    drawn[lost_after:] = [(LOSE, lost, "")]
    left = [node for node in nodes if node != lost]
    while len(drawn) < count:
        drawn += _round(chance, head, left, parts)
    step_s = duration_s / count
    return [
        Fault(
            at_s=(number + chance.uniform(0.0, 1.0 - QUIET_SHARE)) * step_s,
            what=what,
            host=host,
            target=target,
        )
        for number, (what, host, target) in enumerate(drawn[:count])
    ]


def _round(
    chance: random.Random, head: str, nodes: Sequence[str], parts: Parts
) -> list[tuple[str, str, str]]:
    """Every part once, every link once, links in one direction, restarts of the head and a node."""
    found = [(KILL, head, part) for part in parts.head]
    found += [(KILL, chance.choice(list(nodes)), part) for part in parts.node]
    found += [(CUT, a, b) for a, b in combinations((head, *nodes), 2)]
    a, b = chance.sample([head, *nodes], 2)
    found.append((CUT_ONE_WAY, a, b))
    found += [(REBOOT, host, "") for host in (head, chance.choice(list(nodes)))]
    chance.shuffle(found)
    return found
