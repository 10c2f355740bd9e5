"""StaleFlow's Alg. 2 to 4 step by step, as slow as the paper writes them.

They share no code with `plexrl.rollout.coordinator.strategies`. Each question about a version asks
a copy of the staleness manager, in which everything that was decided before is reserved.
"""

from copy import deepcopy
from dataclasses import dataclass, replace

from plexrl.rollout.staleness.manager import StalenessManager
from plexrl.rollout.trajectories.record import SampleGroupId, TrajectoryId


@dataclass(frozen=True)
class Coefficients:
    k1: float
    k2: float
    k3: float
    k4: float
    k5: float

    def throughput(self, kv: float, n: int) -> float:
        return n / (self.k1 * kv + max(self.k2, self.k3 * n) + self.k4)


@dataclass(frozen=True)
class Instance:
    """One row of the snapshot S."""

    name: str
    version: int
    kv: float
    budget: float
    run: int
    wait: int

    def with_one_more(self, k: Coefficients, length: int) -> "Instance":
        """Eq. 3."""
        if self.kv + k.k5 * length <= self.budget and self.wait == 0:
            return replace(self, kv=self.kv + k.k5 * length, run=self.run + 1)
        return replace(self, wait=self.wait + 1)

    def gain(self, k: Coefficients, length: int) -> float:
        after = self.with_one_more(k, length)
        return k.throughput(after.kv, after.run) - k.throughput(self.kv, self.run)


@dataclass(frozen=True)
class Waiting:
    """A trajectory on the trajectory server."""

    id: TrajectoryId
    group: SampleGroupId
    version: int | None
    length: int


Snapshot = dict[str, Instance]


def check_routable(manager: StalenessManager, each: Waiting, instance: Instance) -> bool:
    """Alg. 2."""
    if each.version is None:
        return manager.buffers.admits(each.group, instance.version)
    return instance.version >= each.version


def routing(
    snapshot: Snapshot,
    manager: StalenessManager,
    waiting: list[Waiting],
    k: Coefficients,
    mu: float,
) -> list[tuple[TrajectoryId, str]]:
    """Alg. 3, but what no version takes by `mu` goes where it gains most; `waiting` is in the order
    of the queues already."""
    snapshot, manager = dict(snapshot), deepcopy(manager)
    routed = []
    for each in waiting:
        candidates = [i for i in snapshot.values() if check_routable(manager, each, i)]
        ideal = 1 / (k.k1 * k.k5 * each.length + max(k.k2, k.k3) + k.k4)
        selected = None
        for version in sorted({i.version for i in candidates}):
            group = [i for i in candidates if i.version == version]
            best = max(group, key=lambda i: (i.gain(k, each.length), -int(i.name)))
            if best.gain(k, each.length) >= mu * ideal:
                selected = best
                break
        roomy = [i for i in candidates if i.with_one_more(k, each.length).run > i.run]
        if selected is None and roomy:
            selected = max(roomy, key=lambda i: (i.gain(k, each.length), -int(i.name)))
        if selected is None:
            break
        routed.append((each.id, selected.name))
        snapshot[selected.name] = selected.with_one_more(k, each.length)
        if each.version is None:
            manager.reserve(each.group, each.id, selected.version)
    return routed


def synchronisation(
    snapshot: Snapshot,
    manager: StalenessManager,
    waiting: list[Waiting],
    k: Coefficients,
    mu: float,
    newest: int,
    *,
    by_version_only: bool,
) -> list[str]:
    """Alg. 4. Its first step asks whether a trajectory could be routed to the instance by its
    version; if not `by_version_only`, whether one is routed to it."""
    found = []
    useful = {name for _, name in routing(snapshot, manager, waiting, k, mu)}
    for name, instance in snapshot.items():
        if by_version_only:
            can_route = any(check_routable(manager, each, instance) for each in waiting)
        else:
            can_route = name in useful
        if instance.version >= newest or can_route:
            continue
        tentative = snapshot | {name: replace(instance, version=newest)}
        if name in {to for _, to in routing(tentative, manager, waiting, k, mu)}:
            found.append(name)
    return found
