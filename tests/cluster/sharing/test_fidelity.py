"""Live jobs that share a group, and the simulator's predictions of recorded runs."""

import math
from collections.abc import Iterator

import pytest

from benchmarks.simulating.live_jobs import LiveJob, LiveRun, run_live
from plexrl.cluster.embedded.start import EmbeddedCluster, start_embedded
from plexrl.sim.fidelity.fidelity import compare_drawn, compare_recorded
from plexrl.sim.fidelity.forecast import skill_of
from plexrl.sim.fidelity.planning import named
from plexrl.sim.fidelity.recording import overheads, recorded_run
from plexrl.sim.fidelity.run_forecast import forecast_run
from plexrl.traces.convert.history import History, history_of
from plexrl.traces.convert.recorder import record

FIFO_LOCK = named("fifo-lock")

CYCLES = 8
pytestmark = pytest.mark.slow
FORECAST_CYCLES = 30
JOBS = (
    LiveJob(name="a", rows=4, hidden=64, rollout_s=0.05, cycles=CYCLES),
    LiveJob(name="b", rows=8, hidden=128, rollout_s=0.08, cycles=CYCLES),
)


@pytest.fixture(scope="module")
def crowded() -> Iterator[EmbeddedCluster]:
    """A cluster of one GPU for training, and one for the rollout of each of three jobs."""
    running = start_embedded(virtual_gpus=4, policy="pack", ordering="fifo-bursts")
    yield running
    running.close()


@pytest.fixture(scope="module")
def shared(crowded: EmbeddedCluster) -> LiveRun:
    return run_live(crowded, JOBS, label="shared", seed=3)


def test_the_prediction_of_recorded_cycles_beats_no_waiting(shared: LiveRun) -> None:
    history = history_of(shared.jobs, shared.operations, shared.status)
    beyond = overheads(history.operations)
    jobs = recorded_run(history.jobs, history.operations, {job.name: beyond for job in JOBS})
    assert [job.name for job in jobs] == ["a", "b"]
    assert all(len(job.cycles) == CYCLES for job in jobs)
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
    found = compare_recorded(jobs, FIFO_LOCK)
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
    history = history_of(shared.jobs, shared.operations, shared.status)
    beyond = overheads(history.operations)
    jobs = recorded_run(history.jobs, history.operations, {job.name: beyond for job in JOBS})
    rows = record(history.jobs, history.operations, history.now)
    names = {view["job"]: view["name"] for view in shared.jobs}
    found = compare_drawn(rows, jobs, FIFO_LOCK, seeds=(1,), names=names)
    assert [job.job for job in found] == ["a", "b"]
    assert all(job.alone_s > 0.0 for job in found)
    assert all(0.0 < job.predicted_s < math.inf for job in found)


def test_three_jobs_are_predicted_from_runs_of_two(crowded: EmbeddedCluster) -> None:
    jobs = {
        name: LiveJob(name=name, rows=9, hidden=hidden, rollout_s=0.3, cycles=FORECAST_CYCLES)
        for name, hidden in (("a", 192), ("b", 256), ("c", 320))
    }
    pairs, all_three = (
        [_history(crowded, [jobs[name] for name in mix], seed) for seed, mix in enumerate(mixes)]
        for mixes in (("ab", "bc"), ("abc",))
    )
    found = forecast_run(all_three[0], pairs, FIFO_LOCK, seeds=range(5), warm_up=3)
    assert [each.forecast.job for each in found.jobs] == ["a", "b", "c"]
    skill = skill_of(found.jobs)
    # The aim is 5 % on a quiet machine. Here others may compute on the same cores.
    assert skill.forecast.median < 0.15, skill
    assert skill.skill > 0.0, skill


def _history(running: EmbeddedCluster, jobs: list[LiveJob], seed: int) -> History:
    label = "-".join(job.name for job in jobs)
    run = run_live(running, jobs, label=label, seed=seed)
    return history_of(run.jobs, run.operations, run.status)
