"""A move takes as long as on its slowest node; a job's state is limited by its GPUs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plexrl.errors import InvalidRequestError
from plexrl.scheduler.rules.switch_cost import HOST, NVME
from plexrl.sim.state.device_state import DEVICE_PART, device_state_bytes
from plexrl.sim.state.move_costs import MoveCosts
from plexrl.sim.workload.scenario import NodeType, Pool
from plexrl.traces import MODEL_CLASSES, TraceJob

H200 = NodeType()
POOLS = (Pool(nodes=4), Pool(nodes=2, node_type=NodeType(name="old", host_bytes_per_s=10e9)))


@pytest.mark.parametrize(("model", "switch_s"), [("7B", 1.53), ("30B", 1.07), ("235B", 1.34)])
def test_a_warm_switch_of_a_published_job_takes_what_the_docstring_says(
    model: str, switch_s: float
) -> None:
    profile = MODEL_CLASSES[model]
    state_bytes = profile.demand()["state_bytes"]
    costs = MoveCosts(POOLS)
    took_s = costs.offload_s("h200", state_bytes, profile.gpus)
    took_s += costs.load_s("h200", state_bytes, profile.gpus)
    assert took_s == pytest.approx(switch_s, abs=0.01)


def test_each_gpu_has_its_own_link_and_the_node_one_array_and_one_network() -> None:
    costs = MoveCosts(POOLS)
    state_bytes = 160 * 10**9
    assert costs.load_s("h200", state_bytes, 8) == pytest.approx(0.5 + 20 / 50)
    assert costs.load_s("old", state_bytes, 8) == pytest.approx(0.5 + 20 / 10)
    assert costs.load_s("h200", state_bytes, 8, NVME) == pytest.approx(0.5 + 160 / 20)
    assert costs.migrate_s("h200", state_bytes, 8) == pytest.approx(0.5 + 160 / 50)
    # 16 GPUs are two nodes, 12 are one and a half: the full one is the last.
    assert costs.load_s("h200", state_bytes, 16, NVME) == pytest.approx(0.5 + 80 / 20)
    assert costs.load_s("h200", state_bytes, 12, NVME) == pytest.approx(0.5 + 160 * 8 / 12 / 20)
    assert costs.nvme_s("h200", 10**10) == pytest.approx(0.5)


@given(st.integers(0, 10**13), st.integers(1, 512), st.sampled_from([HOST, NVME]))
def test_a_switch_that_was_given_is_halved_and_nvme_is_never_faster(
    state_bytes: int, gpus: int, tier: str
) -> None:
    by_rates, given_8s = MoveCosts(POOLS), MoveCosts(POOLS, 8.0)
    assert given_8s.load_s("h200", state_bytes, gpus) == 4.0
    assert given_8s.offload_s("h200", state_bytes, gpus) == 4.0
    assert given_8s.load_s("h200", state_bytes, gpus, tier) >= 4.0
    assert by_rates.load_s("h200", state_bytes, gpus, NVME) >= by_rates.load_s(
        "h200", state_bytes, gpus, tier
    )


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="at least 0 s"):
        MoveCosts(POOLS, -1.0)
    with pytest.raises(InvalidRequestError, match="its own name"):
        MoveCosts((Pool(nodes=1), Pool(nodes=1, node_type=NodeType(price=1.0))))


def test_a_state_is_the_rows_as_far_as_its_gpus_hold_it() -> None:
    whole = MODEL_CLASSES["235B"].demand()["state_bytes"]
    small = TraceJob(job_id="a", submit_s=0.0, duration_s=1.0, gpus=17, state_bytes=whole)
    most = DEVICE_PART * H200.gpu_memory_bytes * 17
    assert device_state_bytes(small, H200) == pytest.approx(most, rel=1e-9)
    published = TraceJob(job_id="b", submit_s=0.0, duration_s=1.0, gpus=384, state_bytes=whole)
    assert device_state_bytes(published, H200) == whole
    unknown = TraceJob(job_id="c", submit_s=0.0, duration_s=1.0, gpus=8)
    assert device_state_bytes(unknown, H200) == MODEL_CLASSES["7B"].demand()["state_bytes"]


def test_a_switch_of_0_s_takes_no_time_from_or_to_nvme_either() -> None:
    pool = Pool(nodes=1)
    for switch_s in (0.0, 8.0):
        costs = MoveCosts((pool,), switch_s)
        for tier in (HOST, NVME):
            assert costs.load_s("h200", 800 << 30, 8, tier) == switch_s / 2
            assert costs.offload_s("h200", 800 << 30, 8, tier) == switch_s / 2
        assert costs.nvme_s("h200", 800 << 30) == 0.0
