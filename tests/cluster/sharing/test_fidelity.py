"""Two live jobs that share a group, and the simulator's prediction of the recorded run."""

import math
from collections.abc import Iterator

import pytest

from benchmarks.simulating.live_jobs import LiveJob, LiveRun, run_live
from plexrl.cluster.embedded.start import EmbeddedCluster, start_embedded
from plexrl.sim.fidelity.fidelity import compare_drawn, compare_recorded
from plexrl.sim.fidelity.recording import overheads, recorded_run
from plexrl.traces.convert.recorder import record

CYCLES = 8
pytestmark = pytest.mark.slow
JOBS = (
    LiveJob(name="a", rows=4, hidden=64, rollout_s=0.05),
    LiveJob(name="b", rows=8, hidden=128, rollout_s=0.08),
)


@pytest.fixture(scope="module")
def crowded() -> Iterator[EmbeddedCluster]:
    """A cluster of one GPU for training, and one for each job's rollout."""
    running = start_embedded(gpus_per_node=1 + len(JOBS), policy="pack", ordering="fifo-bursts")
    yield running
    running.close()


@pytest.fixture(scope="module")
def shared(crowded: EmbeddedCluster) -> LiveRun:
    return run_live(crowded, JOBS, label="shared", cycles=CYCLES, seed=3)


def test_the_prediction_of_recorded_cycles_beats_no_waiting(shared: LiveRun) -> None:
    beyond = overheads(shared.operations)
    jobs = recorded_run(shared.jobs, shared.operations, {job.name: beyond for job in JOBS})
    assert [job.name for job in jobs] == ["a", "b"]
    assert all(len(job.cycles) >= CYCLES for job in jobs)
    for job in jobs:
        assert job.kinds == ("forward", "forward_backward", "optim_step", "publish")
        assert job.load_s > 0.0
        assert job.offload_s > 0.0
        assert all(cycle.took_s > 0.0 for cycle in job.cycles)
        (deployment,) = {
            each["deployment"]
            for view in shared.jobs
            for each in view["deployments"]
            if view["name"] == job.name and each["kind"] == "train"
        }
        computed_s = math.fsum(
            row["compute_s"]
            for row in shared.operations
            if row["deployment"] == deployment and row["kind"] in job.kinds
        )
        added_s = len(job.cycles) * math.fsum(beyond[kind] for kind in job.kinds)
        kept_s = math.fsum(each for cycle in job.cycles for each in cycle.segments_s)
        assert kept_s == pytest.approx(computed_s + added_s)
    found = compare_recorded(jobs, "fifo-lock")
    assert len(found.cycles) == sum(len(job.cycles) - 3 for job in jobs)
    for cycle in found.cycles:
        # The simulator adds waiting to a cycle's own seconds and removes nothing.
        assert cycle.predicted_s >= cycle.alone_s - 1e-6
    # The jobs share one GPU, so a forecast without waiting is wrong. Over all cycles the simulator
    # must come nearer to the measured seconds than that forecast.
    measured_s, predicted_s, alone_s = (
        math.fsum(getattr(cycle, name) for cycle in found.cycles)
        for name in ("measured_s", "predicted_s", "alone_s")
    )
    assert predicted_s > 1.01 * alone_s
    assert abs(predicted_s - measured_s) < abs(alone_s - measured_s)


def test_the_recorders_rows_of_a_live_run_can_be_simulated(shared: LiveRun) -> None:
    beyond = overheads(shared.operations)
    jobs = recorded_run(shared.jobs, shared.operations, {job.name: beyond for job in JOBS})
    rows = record(shared.jobs, shared.operations, shared.ended_at)
    names = {view["job"]: view["name"] for view in shared.jobs}
    found = compare_drawn(rows, jobs, "fifo-lock", seeds=(1,), names=names)
    assert [job.job for job in found] == ["a", "b"]
    assert all(job.alone_s > 0.0 for job in found)
    assert all(0.0 < job.predicted_s < math.inf for job in found)
