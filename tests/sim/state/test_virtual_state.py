"""States are evicted, loaded and lost as in the StateManagers."""

from dataclasses import replace
from random import Random

import pytest

from plexrl.ids import DeploymentId, NodeId
from plexrl.scheduler.rules.switch_cost import HOST, NVME
from plexrl.sim.state.move_costs import MoveCosts
from plexrl.sim.state.virtual_state import Move, VirtualState
from plexrl.sim.workload.scenario import NodeType, Pool

GB = 10**9
KIND = NodeType(
    gpus=4,
    host_memory_bytes=100 * GB,
    nvme_bytes=100 * GB,
    host_bytes_per_s=10e9,
    nvme_bytes_per_s=5e9,
    network_bytes_per_s=5e9,
    move_fixed_s=1.0,
)
NODES = tuple(NodeId(f"n{index}") for index in range(4))
A, B, C, D = (DeploymentId(name) for name in "abcd")


@pytest.fixture
def states() -> VirtualState:
    found = VirtualState(MoveCosts([Pool(nodes=4, node_type=KIND)]))
    for node in NODES:
        found.add_node(node, KIND)
    return found


def offloaded(
    states: VirtualState, deployment: DeploymentId, next_use_s: float | None, now: float
) -> Move:
    move = states.offload(deployment, next_use_s, now)
    assert move is not None
    states.check()
    return move


def on_one_node(states: VirtualState, *names: DeploymentId, nbytes: int = 40 * GB) -> None:
    for name in names:
        states.launched(name, nbytes, [NODES[0]] * 4)


def test_what_fits_in_host_memory_stays_there(states: VirtualState) -> None:
    on_one_node(states, A, B)
    for now in (0.0, 100.0):
        for name in (A, B):
            move = offloaded(states, name, 50.0, now)
            assert (move.took_s, move.moved.tier, move.reports) == (1.0 + 10 / 10, HOST, ())
            load = states.load(name, now + 10.0)
            assert load is not None
            assert (load.took_s, load.moved.tier, load.moved.bytes_moved) == (2.0, HOST, 40 * GB)


def test_what_is_needed_last_gives_way_and_the_spill_is_waited_for(states: VirtualState) -> None:
    on_one_node(states, A, B, C)
    offloaded(states, A, 100.0, 0.0)
    offloaded(states, B, 500.0, 1.0)
    move = offloaded(states, C, 50.0, 2.0)
    assert move.took_s == pytest.approx(2.0 + 40 / 5)
    assert move.moved.tier == HOST
    (report,) = move.reports
    (where,) = report.states
    assert (report.node, where.deployment) == (NODES[0], B)
    assert (where.host_bytes, where.nvme_bytes) == (0, 40 * GB)
    load = states.load(B, 10.0)
    assert load is not None
    assert (load.took_s, load.moved.tier) == (1.0 + 40 / 5, NVME)
    load = states.load(A, 20.0)
    assert load is not None
    assert load.moved.tier == HOST


def test_what_lay_idle_for_long_is_copied_and_gives_way_at_no_cost(states: VirtualState) -> None:
    on_one_node(states, A, B, C)
    offloaded(states, A, None, 0.0)
    offloaded(states, B, None, 1.0)
    assert offloaded(states, C, None, 1000.0).took_s == 2.0
    load = states.load(A, 1001.0)
    assert load is not None
    assert load.moved.tier == NVME


def test_a_prefetch_brings_back_what_has_room_and_gives_way_to_a_load(states: VirtualState) -> None:
    on_one_node(states, A, B, C)
    for name, next_use_s in ((A, 100.0), (B, 500.0), (C, 50.0)):
        offloaded(states, name, next_use_s, 0.0)
    assert states.prefetch(B, [NODES[0]], 5.0, 1.0) == []
    states.forget(A)
    ((at, node),) = states.prefetch(B, [NODES[0]], 5.0, 1.0)
    assert (at, node) == (1.0 + 40 / 5, NODES[0])
    assert states.prefetch(B, [NODES[0]], 5.0, 2.0) == []
    cut = states.load(B, 3.0)
    assert cut is not None
    assert cut.moved.tier == NVME
    assert states.prefetched(B, node, at) is None
    ((at, node),) = states.prefetch(B, [NODES[0]], 5.0, 20.0)
    report = states.prefetched(B, node, at)
    assert report is not None
    assert report.states[0].host_bytes == 40 * GB
    states.check()
    whole = states.load(B, 40.0)
    assert whole is not None
    assert whole.moved.tier == HOST


def test_prefetches_under_way_leave_less_room_for_the_next(states: VirtualState) -> None:
    on_one_node(states, A, B, nbytes=50 * GB)
    on_one_node(states, C, D, nbytes=30 * GB)
    for name, next_use_s in ((A, 100.0), (B, 500.0), (C, 50.0), (D, 10.0)):
        offloaded(states, name, next_use_s, 0.0)
    states.forget(C)
    # 70 GB are free, for one of the two that lie on NVMe.
    ((at, node),) = states.prefetch(A, [NODES[0]], 5.0, 1.0)
    assert states.prefetch(B, [NODES[0]], 5.0, 2.0) == []
    assert states.prefetched(A, node, at) is not None
    assert states.prefetch(B, [NODES[0]], 5.0, at) == []
    states.check()


def test_a_new_version_takes_the_room_of_a_prefetch(states: VirtualState) -> None:
    on_one_node(states, A, B, C)
    for name, next_use_s in ((A, 100.0), (B, 500.0), (C, 50.0)):
        offloaded(states, name, next_use_s, 0.0)
    states.forget(A)
    ((at, node),) = states.prefetch(B, [NODES[0]], 5.0, 1.0)
    on_one_node(states, D)
    offloaded(states, D, 10.0, 2.0)
    assert states.prefetched(B, node, at) is None
    states.check()


def test_a_state_without_room_anywhere_is_refused_and_nothing_is_lost(states: VirtualState) -> None:
    on_one_node(states, A, B, C, D, nbytes=60 * GB)
    for name in (A, B):
        offloaded(states, name, 1.0, 0.0)
    assert states.offload(C, 1.0, 1.0) is None
    states.check()
    for name in (A, B):
        assert states.load(name, 2.0) is not None
    states.forget(A)
    assert states.offload(C, 1.0, 3.0) is not None


def test_each_node_has_its_ranks_part_and_tells_of_its_own_tier(states: VirtualState) -> None:
    on_one_node(states, A, nbytes=90 * GB)
    offloaded(states, A, 1000.0, 0.0)
    states.launched(B, 120 * GB, [NODES[0]] * 2 + [NODES[1]] * 4)
    move = offloaded(states, B, 1.0, 1.0)
    assert move.moved.tier == HOST
    assert {report.node for report in move.reports} == {NODES[0]}
    states.check()


def test_a_migrated_state_is_loaded_where_it_went(states: VirtualState) -> None:
    on_one_node(states, A)
    offloaded(states, A, None, 0.0)
    ((at, node, arrived),) = states.migrate(A, [NODES[2]], 1.0)
    assert (at, node, arrived) == (1.0 + 1.0 + 40 / 5, NODES[2], True)
    states.launched(A, 40 * GB, [NODES[2]] * 4)
    states.release(A, [NODES[0]])
    states.check()
    assert states.states_on(NODES[0]) == ()
    load = states.load(A, 20.0)
    assert load is not None
    assert load.took_s == 2.0


@pytest.mark.parametrize("survives", [True, False])
def test_a_lost_node_keeps_what_survives(states: VirtualState, survives: bool) -> None:
    on_one_node(states, A, B, C)
    for name, next_use_s in ((A, 100.0), (B, 500.0), (C, 50.0)):
        offloaded(states, name, next_use_s, 0.0)
    states.node_lost(NODES[0], survives)
    states.check()
    assert states.states_on(NODES[0]) == ((A, B, C) if survives else (B,))
    assert (states.load(A, 10.0) is not None) == survives
    assert states.load(B, 10.0) is not None


@pytest.mark.parametrize("seed", range(8))
def test_the_laws_hold_whatever_happens(states: VirtualState, seed: int) -> None:
    random = Random(seed)
    names = [DeploymentId(f"d{index}") for index in range(9)]
    live: dict[DeploymentId, int] = {}
    coming: list[tuple[float, DeploymentId, NodeId]] = []
    now = 0.0
    for _ in range(600):
        now += random.expovariate(0.1)
        name = random.choice(names)
        match random.randrange(9):
            case 0 | 1 if name not in live:
                first, width = random.randrange(3), random.choice([1, 2, 4, 8])
                nodes = [NODES[first + index // 4] for index in range(width)]
                live[name] = random.randrange(1, 50) * GB
                states.launched(name, live[name], nodes)
                assert states.build(name).took_s > 0.0
            case 2 | 3 | 4 if name in live:
                states.offload(name, random.choice([None, 5.0, 50.0, 500.0]), now)
            case 5 if name in live:
                states.load(name, now)
            case 6 if name in live:
                coming += [(at, name, node) for at, node in states.prefetch(name, NODES, None, now)]
            case 7 if random.random() < 0.3:
                states.node_lost(random.choice(NODES), random.random() < 0.5)
            case 8 if name in live and random.random() < 0.4:
                states.forget(name)
                del live[name]
        for each in [each for each in coming if each[0] <= now]:
            coming.remove(each)
            states.prefetched(each[1], each[2], each[0])
        states.check()
    for name in live:
        states.forget(name)
    states.check()
    assert all(states.states_on(node) == () for node in NODES)


def test_a_load_after_an_offload_copies_what_finds_free_memory_before(
    states: VirtualState,
) -> None:
    on_one_node(states, A, B, nbytes=40 * GB)
    for name in (A, B):
        offloaded(states, name, None, 0.0)
    load = states.load(B, 1.0)
    assert load is not None
    # 141 GiB hold both states of 10 GB on each GPU.
    beside = states.overlap(A, load, B)
    assert beside.took_s == pytest.approx(load.took_s - 10 / 10)
    assert beside.moved.prefetched_bytes == load.moved.bytes_moved
    assert beside.moved.prefetch_s == pytest.approx(10 / 10)


@pytest.mark.parametrize("gpu_memory", [0, 10 * GB, 14 * GB, 30 * GB])
def test_an_overlap_is_bounded_by_memory_and_by_the_offload(gpu_memory: int) -> None:
    kind = replace(KIND, gpu_memory_bytes=gpu_memory)
    found = VirtualState(MoveCosts([Pool(nodes=1, node_type=kind)]))
    found.add_node(NODES[0], kind)
    found.launched(A, 10 * GB, [NODES[0]])
    found.launched(B, 8 * GB, [NODES[0]])
    for name in (A, B):
        found.offload(name, None, 0.0)
    load = found.load(B, 1.0)
    assert load is not None
    part = min(1.0, max(0.0, (gpu_memory - 10 * GB) / (8 * GB)))
    assert found.overlap(A, load, B).took_s == pytest.approx(load.took_s - part * 8 / 10)
