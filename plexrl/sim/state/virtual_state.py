"""Where the states of deployments lie that are not on their GPUs, and what moving them takes.

Each node keeps versions in host memory and spills to NVMe what is expected to be needed last, by
the StateManager's own policy (`plexrl.statemanager.eviction.policy.plan_eviction`), from the next
uses that the scheduler predicts. Where this departs from the StateManager:

- A version moves as one, whatever its ranks share, and takes its device bytes: tiers that are all
  but full may refuse what the StateManagers would find room for rank by rank.
- Of copies that are written to NVMe ahead of pressure: a version counts as copied, and leaves host
  memory at no cost, once it has lain idle for as long as the node's NVMe needs for all of a host
  tier that is `DRAIN_FROM` full. Copies take no room: they are given up for whatever needs it.
- Moves beside each other do not slow each other down.

Laws, which `check` proves: no tier holds more than its bound; every version lies whole in one tier
of each node of its own; what is kept is of deployments that were not released. Pure.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from plexrl.ids import DeploymentId, NodeId
from plexrl.scheduler.dispatch.switch_cost import HOST, NVME
from plexrl.scheduler.state.events import StateMoved, StateReported, StateResidency
from plexrl.sim.state.move_costs import MoveCosts
from plexrl.sim.workload.scenario import NodeType
from plexrl.statemanager.eviction.policy import (
    EvictionCandidate,
    TierName,
    TierUsage,
    expected_use,
    plan_eviction,
)

DRAIN_FROM = 0.5
"""Of host memory, in use before the StateManager copies anything ahead of pressure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """What a load or an offload comes to."""

    took_s: float
    moved: StateMoved
    reports: tuple[StateReported, ...] = ()
    """What the nodes tell the scheduler afterwards: of others that gave way, and of this one where
    its nodes have it in different tiers."""


@dataclass(slots=True)
class _State:
    """Of one deployment."""

    deployment: DeploymentId
    state_bytes: int
    node_type: str
    bytes_on: Mapping[NodeId, int] = field(default_factory=dict)
    """By the nodes of its ranks."""
    gpus: int = 1
    lies: dict[NodeId, int] = field(default_factory=dict)
    """Bytes of the newest version, by the nodes that have a part of it."""
    on_nvme: set[NodeId] = field(default_factory=set)
    """Nodes of these whose part is not in host memory."""
    next_use: float | None = None
    """When it was expected to be needed."""
    last_use: float = 0.0
    tick: int = 0
    """Order of last uses."""
    in_place: bool = False
    """The newest version lies in host memory on all nodes of its ranks, and nowhere else."""
    host_load: Move | None = None
    host_offload: Move | None = None


@dataclass(slots=True)
class _Tiers:
    """Of one node."""

    node_type: NodeType
    residents: dict[DeploymentId, _State] = field(default_factory=dict)
    host_bytes: int = 0
    nvme_bytes: int = 0
    arriving: dict[DeploymentId, float] = field(default_factory=dict)
    """When prefetches under way will be done."""

    def arriving_bytes(self, node: NodeId) -> int:
        """Of host memory, set aside for prefetches."""
        return sum(self.residents[name].lies[node] for name in self.arriving)


class VirtualState:
    """All nodes' StateManagers together."""

    def __init__(self, costs: MoveCosts) -> None:
        self._costs = costs
        self._nodes: dict[NodeId, _Tiers] = {}
        self._states: dict[DeploymentId, _State] = {}
        self._tick = 0

    def add_node(self, node: NodeId, node_type: NodeType) -> None:
        """A node that is there from now on."""
        self._nodes[node] = _Tiers(node_type)

    def launched(self, deployment: DeploymentId, state_bytes: int, nodes: Sequence[NodeId]) -> None:
        """A deployment has its GPUs; `nodes`: of each of its ranks."""
        known = self._states.get(deployment)
        if known is None:
            known = self._states[deployment] = _State(deployment, state_bytes, "")
        known.node_type = self._nodes[nodes[0]].node_type.name
        known.gpus = len(nodes)
        counts: dict[NodeId, int] = {}
        for node in nodes:
            counts[node] = counts.get(node, 0) + 1
        known.bytes_on = {
            node: known.state_bytes * count // len(nodes) for node, count in counts.items()
        }
        kind, gpus = known.node_type, known.gpus
        moved = StateMoved(bytes_moved=state_bytes, tier=HOST)
        load_s = self._costs.load_s(kind, state_bytes, gpus)
        offload_s = self._costs.offload_s(kind, state_bytes, gpus)
        known.host_load = Move(took_s=load_s, moved=moved)
        known.host_offload = Move(took_s=offload_s, moved=moved)
        self._look_at(known)

    def build(self, deployment: DeploymentId) -> Move:
        """A first load, of initial weights: as long as one from host memory, by assumption."""
        built = self._states[deployment].host_load
        assert built is not None, f"{deployment} loads without GPUs"
        return built

    def load(self, deployment: DeploymentId, now: float) -> Move | None:
        """A load of the newest version begins; None: a node lacks its part, the state is lost."""
        known = self._states[deployment]
        self._used(known, now)
        if known.in_place:
            return known.host_load
        if any(node not in known.lies for node in known.bytes_on):
            return None
        for node in known.bytes_on:
            # What is on its way to host memory gives way, and is read from where it lies.
            self._nodes[node].arriving.pop(deployment, None)
        if not any(node in known.on_nvme for node in known.bytes_on):
            return known.host_load
        took_s = self._costs.load_s(known.node_type, known.state_bytes, known.gpus, NVME)
        return Move(took_s=took_s, moved=StateMoved(bytes_moved=known.state_bytes, tier=NVME))

    def offload(
        self, deployment: DeploymentId, next_use_s: float | None, now: float
    ) -> Move | None:
        """An offload or a snapshot makes a version; None: a node has no room for it, and nothing
        has changed but what gave way."""
        known = self._states[deployment]
        self._used(known, now)
        known.next_use = None if next_use_s is None else now + next_use_s
        if known.in_place:
            # A node that had room for the old version has room for the new one.
            return known.host_offload
        reports: list[StateReported] = []
        spill_s = 0.0
        for node, nbytes in known.bytes_on.items():
            found = self._keep(known, node, nbytes, now)
            if found is None:
                return None
            victims, spilled_bytes = found
            spill_s = max(spill_s, self._costs.nvme_s(known.node_type, spilled_bytes))
            if victims:
                reports.append(StateReported(node=node, states=tuple(victims)))
        for node in [node for node in known.lies if node not in known.bytes_on]:
            # Left over from GPUs that it had before.
            self._drop(known, node)
        self._look_at(known)
        tier = NVME if known.on_nvme else HOST
        if known.on_nvme and known.on_nvme != set(known.bytes_on):
            reports += [self._report(known, node) for node in known.bytes_on]
        took_s = self._costs.offload_s(known.node_type, known.state_bytes, known.gpus, tier)
        return Move(
            took_s=took_s + spill_s,
            moved=StateMoved(bytes_moved=known.state_bytes, tier=tier),
            reports=tuple(reports),
        )

    def prefetch(
        self,
        deployment: DeploymentId,
        nodes: Iterable[NodeId],
        next_use_s: float | None,
        now: float,
    ) -> list[tuple[float, NodeId]]:
        """A hint to bring the newest version to host memory, where that has room; returns by when
        each node will have done so: `arrived` is to be called then."""
        known = self._states.get(deployment)
        if known is None:
            return []
        if next_use_s is not None:
            known.next_use = now + next_use_s
        coming = []
        for node in nodes:
            tiers = self._nodes[node]
            if node not in known.on_nvme or deployment in tiers.arriving:
                continue
            nbytes = known.lies[node]
            room = tiers.node_type.host_memory_bytes - tiers.host_bytes
            if nbytes + tiers.arriving_bytes(node) > room:
                continue
            done_at = now + self._costs.nvme_s(tiers.node_type.name, nbytes)
            tiers.arriving[deployment] = done_at
            coming.append((done_at, node))
        return coming

    def arrived(self, deployment: DeploymentId, node: NodeId, now: float) -> StateReported | None:
        """A prefetch that ends now is done; None: it was given up meanwhile."""
        tiers = self._nodes[node]
        if tiers.arriving.get(deployment) != now:
            return None
        del tiers.arriving[deployment]
        known = self._states[deployment]
        nbytes = known.lies[node]
        tiers.nvme_bytes -= nbytes
        tiers.host_bytes += nbytes
        known.on_nvme.discard(node)
        self._look_at(known)
        return self._report(known, node)

    def migrate(
        self, deployment: DeploymentId, nodes: Sequence[NodeId], now: float
    ) -> list[tuple[float, NodeId, bool]]:
        """New nodes fetch the newest version; returns by when each has it, or has no room."""
        known = self._states[deployment]
        self._used(known, now)
        kind = self._nodes[nodes[0]].node_type
        took_s = self._costs.migrate_s(kind.name, known.state_bytes, known.gpus)
        nbytes = known.state_bytes * min(known.gpus, kind.gpus) // known.gpus
        known.in_place = False
        return [
            (now + took_s, node, self._keep(known, node, nbytes, now) is not None) for node in nodes
        ]

    def release(self, deployment: DeploymentId, nodes: Iterable[NodeId]) -> None:
        """Nodes drop all that they keep of a deployment."""
        known = self._states.get(deployment)
        if known is None:
            return
        for node in nodes:
            self._drop(known, node)
        self._look_at(known)

    def forget(self, deployment: DeploymentId) -> None:
        """A deployment has ended."""
        known = self._states.get(deployment)
        if known is not None:
            for node in list(known.lies):
                self._drop(known, node)
            del self._states[deployment]

    def node_lost(self, node: NodeId, survives: bool) -> None:
        """A node is away. What lies on NVMe it has when it is back, what is in host memory only if
        that `survives`."""
        tiers = self._nodes[node]
        tiers.arriving.clear()
        if survives:
            return
        for known in list(tiers.residents.values()):
            if node not in known.on_nvme:
                self._drop(known, node)
                known.in_place = False

    def states_on(self, node: NodeId) -> tuple[DeploymentId, ...]:
        """Deployments of which the node has a version."""
        return tuple(sorted(self._nodes[node].residents))

    def refusal_s(self, deployment: DeploymentId) -> float:
        """What it takes to learn that a move cannot be."""
        known = self._states[deployment]
        return self._costs.load_s(known.node_type, 0, known.gpus)

    def check(self) -> None:
        """Assert the laws above."""
        for name, tiers in self._nodes.items():
            host = nvme = 0
            for deployment, known in tiers.residents.items():
                assert self._states[deployment] is known, f"{name} keeps {deployment} for nobody"
                on_nvme = name in known.on_nvme
                host += 0 if on_nvme else known.lies[name]
                nvme += known.lies[name] if on_nvme else 0
            assert (host, nvme) == (tiers.host_bytes, tiers.nvme_bytes), f"{name} has drifted"
            assert host <= tiers.node_type.host_memory_bytes, f"{name}'s host memory overflows"
            assert nvme <= tiers.node_type.nvme_bytes, f"{name}'s NVMe overflows"
        for deployment, known in self._states.items():
            assert known.on_nvme <= set(known.lies), f"{deployment} lies on NVMe of nowhere"
            held = {n for n, t in self._nodes.items() if deployment in t.residents}
            assert held == set(known.lies), f"{deployment} is not where it should be"
            if known.in_place:
                assert not known.on_nvme, f"{deployment} is not in host memory everywhere"
                assert dict(known.bytes_on) == known.lies, f"{deployment} lies elsewhere"

    def _used(self, known: _State, now: float) -> None:
        self._tick += 1
        known.tick = self._tick
        known.last_use = now
        if known.next_use is not None and known.next_use <= now:
            # The prediction has come true.
            known.next_use = None

    def _look_at(self, known: _State) -> None:
        known.in_place = not known.on_nvme and known.lies == known.bytes_on

    def _report(self, known: _State, node: NodeId) -> StateReported:
        nbytes, on_nvme = known.lies[node], node in known.on_nvme
        where = StateResidency(
            deployment=known.deployment,
            host_bytes=0 if on_nvme else nbytes,
            nvme_bytes=nbytes if on_nvme else 0,
        )
        return StateReported(node=node, states=(where,))

    def _keep(
        self, known: _State, node: NodeId, nbytes: int, now: float
    ) -> tuple[list[StateResidency], int] | None:
        """Have a new version of `known` on a node in place of the old one; returns who gave way to
        it and the bytes that had to be written for that. None: there is no room."""
        tiers = self._nodes[node]
        kind = tiers.node_type
        tiers.arriving.pop(known.deployment, None)
        victims: list[StateResidency] = []
        written_bytes = 0
        tier = TierName.HOST
        if tiers.host_bytes + nbytes > kind.host_memory_bytes:
            # Prefetches make way for what must be stored.
            tiers.arriving.clear()
            host = TierUsage(used_bytes=tiers.host_bytes, bytes_max=kind.host_memory_bytes)
            nvme = TierUsage(used_bytes=tiers.nvme_bytes, bytes_max=kind.nvme_bytes)
            # Of what lies on NVMe only the old version can give way.
            candidates = [
                self._candidate(each, node, known, now)
                for each in tiers.residents.values()
                if each is known or node not in each.on_nvme
            ]
            placement = plan_eviction(nbytes, candidates, host, nvme)
            if placement is None:
                return None
            tier = placement.tier
            for name in placement.spill:
                victim = tiers.residents[DeploymentId(name)]
                written_bytes += 0 if self._is_copied(victim, tiers, now) else victim.lies[node]
                victims.append(self._spill(victim, node))
        elif tiers.arriving:
            room = kind.host_memory_bytes - tiers.host_bytes - nbytes
            if tiers.arriving_bytes(node) > room:
                tiers.arriving.clear()
        self._drop(known, node)
        tiers.residents[known.deployment] = known
        known.lies[node] = nbytes
        if tier == TierName.HOST:
            tiers.host_bytes += nbytes
        else:
            tiers.nvme_bytes += nbytes
            known.on_nvme.add(node)
        return victims, written_bytes

    def _candidate(
        self, known: _State, node: NodeId, incoming: _State, now: float
    ) -> EvictionCandidate:
        return EvictionCandidate(
            name=known.deployment,
            tier=TierName.NVME if node in known.on_nvme else TierName.HOST,
            nbytes=known.lies[node],
            last_use=known.tick,
            next_use=expected_use(known.next_use, known.last_use, now),
            superseded=known is incoming,
        )

    def _is_copied(self, known: _State, tiers: _Tiers, now: float) -> bool:
        kind = tiers.node_type
        if tiers.host_bytes < DRAIN_FROM * kind.host_memory_bytes:
            return False
        return now - known.last_use >= self._costs.nvme_s(kind.name, tiers.host_bytes)

    def _spill(self, known: _State, node: NodeId) -> StateResidency:
        tiers = self._nodes[node]
        nbytes = known.lies[node]
        tiers.host_bytes -= nbytes
        tiers.nvme_bytes += nbytes
        known.on_nvme.add(node)
        known.in_place = False
        return StateResidency(deployment=known.deployment, host_bytes=0, nvme_bytes=nbytes)

    def _drop(self, known: _State, node: NodeId) -> None:
        tiers = self._nodes[node]
        tiers.arriving.pop(known.deployment, None)
        if tiers.residents.pop(known.deployment, None) is None:
            return
        nbytes = known.lies.pop(node)
        if node in known.on_nvme:
            known.on_nvme.discard(node)
            tiers.nvme_bytes -= nbytes
        else:
            tiers.host_bytes -= nbytes
