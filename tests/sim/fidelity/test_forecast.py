"""A run is predicted from recordings of other runs."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from typer.testing import CliRunner

from plexrl.cli.app import app
from plexrl.errors import InvalidRequestError
from plexrl.scheduler.rules.config import planning
from plexrl.sim.engine.shell import virtual_config
from plexrl.sim.fidelity.forecast import (
    PlannedJob,
    ResampledCycles,
    compare_forecast,
    forecast,
    profile_of,
    skill_of,
)
from plexrl.sim.fidelity.history import recorded_jobs
from plexrl.sim.fidelity.planning import named, planning_of
from plexrl.sim.fidelity.recording import RecordedJob
from plexrl.sim.fidelity.run_forecast import forecast_mix, forecast_run, profiles_in
from plexrl.traces import TraceJob
from plexrl.traces.convert.history import History, history_of, read_history, write_history
from tests.sim.fidelity.test_fidelity import simulated, some_job

PACK = named("pack")
HELD = planning(virtual_config(policy="pack"))
"""What a recording of such a cluster holds."""
FIFO_LOCK = named("fifo-lock")

WARM_UP = 3
SEEDS = (11, 12)
LONG = {"rollout_s": 3.0, "work_s": 1.5}
"""A job whose bursts are many times those of the others."""


def job(name: str, *, work_s: float = 0.0, **fields: Any) -> TraceJob:
    """A job of `some_job`, with `work_s` more of work in its update."""
    made = some_job(name, **fields)
    log_prob, update, sync = made.segments
    later = replace(sync, offset_s=sync.offset_s + work_s)
    longer = replace(update, duration_s=update.duration_s + work_s)
    return replace(
        made, period_s=(made.period_s or 0.0) + work_s, segments=(log_prob, longer, later)
    )


def history(jobs: Sequence[TraceJob], *, seed: int, policy: str = "pack") -> History:
    """What a cluster remembers of a simulated run."""
    views, rows = simulated(jobs, seed=seed, policy=policy)
    # Each run has ids of its own; the names are those of the jobs.
    for view in views:
        view["job"] += f"-{seed}"
        for each in view["deployments"]:
            each["deployment"] += f"-{seed}"
    rows = [{"group": "g1", **row, "deployment": f"{row['deployment']}-{seed}"} for row in rows]
    return history_of(views, rows, {"now": 1e9})


A, B, C = (
    {"rollout_s": 1.0, "cycles": 120},
    {"rollout_s": 1.3, "cycles": 100, "state_bytes": 3 << 20},
    {**LONG, "cycles": 40, "state_bytes": 9 << 20},
)
PAIRS = (
    history([job("a", **A), job("b", **B)], seed=1),
    history([job("b", **B), job("c", **C)], seed=2),
)
"""Runs of two jobs each."""


@pytest.mark.parametrize("seed", [3, 4])
def test_three_jobs_are_predicted_from_runs_of_two(seed: int) -> None:
    run = history([job("a", **A), job("b", **B), job("c", **C)], seed=seed)
    found = forecast_run(run, PAIRS, PACK, seeds=SEEDS, warm_up=WARM_UP)
    assert [each.forecast.job for each in found.jobs] == ["a", "b", "c"]
    skill = skill_of(found.jobs)
    # The aim is a median of 5 % and a 95th percentile of 10 %.
    assert skill.forecast.median < 0.05, skill
    assert skill.forecast.p95 < 0.06, skill
    assert skill.alone.mean > 0.2, "the jobs hardly share: this shows nothing"
    assert skill.skill > 0.8, skill
    for each in found.jobs:
        assert each.forecast.p95_s == pytest.approx(each.measured_p95_s, rel=0.25)


def test_a_run_by_another_rule_is_predicted_by_that_rule() -> None:
    run = history([job("a", **A), job("b", **B), job("c", **C)], seed=5, policy="fifo-lock")
    right = skill_of(forecast_run(run, PAIRS, FIFO_LOCK, seeds=SEEDS, warm_up=WARM_UP).jobs)
    wrong = skill_of(forecast_run(run, PAIRS, PACK, seeds=SEEDS, warm_up=WARM_UP).jobs)
    assert right.forecast.p95 < 0.06
    assert right.skill_over_fifo == 0.0
    assert wrong.skill_over_fifo < 0.0


def test_nothing_but_the_list_of_jobs_is_taken_from_the_predicted_run() -> None:
    run = history([job("a", **A), job("b", **B)], seed=6)
    slower = replace(
        run,
        operations=tuple(
            replace(
                each,
                submitted_at=2.0 * each.submitted_at,
                started_at=None if each.started_at is None else 2.0 * each.started_at,
                finished_at=None if each.finished_at is None else 2.0 * each.finished_at,
                compute_s=3.0,
                tokens=1,
            )
            for each in run.operations
        ),
    )
    one, other = (
        forecast_run(each, PAIRS, PACK, seeds=SEEDS, warm_up=WARM_UP) for each in (run, slower)
    )
    assert [each.forecast for each in one.jobs] == [each.forecast for each in other.jobs]
    assert one.jobs[0].measured_mean_s < other.jobs[0].measured_mean_s


def test_jobs_of_the_sources_are_not_predicted_from_themselves() -> None:
    run = history([job("a", **A), job("b", **B)], seed=8)
    both = replace(
        run, jobs=run.jobs + PAIRS[0].jobs, operations=run.operations + PAIRS[0].operations
    )
    one, other = (
        forecast_run(each, PAIRS, PACK, seeds=SEEDS, warm_up=WARM_UP) for each in (run, both)
    )
    assert one == other
    with pytest.raises(InvalidRequestError, match="compared with themselves"):
        forecast_run(PAIRS[0], PAIRS, PACK, seeds=SEEDS, warm_up=WARM_UP)


def profile(name: str = "a") -> RecordedJob:
    return profiles_in(PAIRS, warm_up=WARM_UP)[0][name]


def test_a_profile_has_all_recordings_of_a_name_without_their_warm_up() -> None:
    found, _ = profiles_in(PAIRS, warm_up=WARM_UP)
    assert {name: len(each.cycles) for name, each in found.items()} == {
        "a": 120 - WARM_UP,
        "b": 2 * (100 - WARM_UP),
        "c": 40 - WARM_UP,
    }
    assert all(each.load_s > 0.0 < each.offload_s for each in found.values())


def test_drawn_cycles_are_whole_recorded_ones_and_depend_on_the_seed() -> None:
    known = profile()
    source, same, other = (ResampledCycles(known, "a", seed) for seed in (1, 1, 2))
    recorded = {(cycle.rollout_s, cycle.tokens) for cycle in known.cycles}
    drawn = [source.draw(number) for number in range(200)]
    assert {(each.rollout_s, each.tokens) for each in drawn} <= recorded
    assert drawn == [same.draw(number) for number in range(200)]
    assert drawn != [other.draw(number) for number in range(200)]
    mean_s = fmean(cycle.alone_s for cycle in known.cycles)
    whole_s = fmean(each.rollout_s + each.busy_s + sum(each.gaps_s) for each in drawn)
    assert whole_s == pytest.approx(mean_s, rel=0.05)


def test_the_same_inputs_give_the_same_forecast() -> None:
    mix = [
        PlannedJob(name=name, profile=profile(name), submit_s=0.0, cycles=30) for name in ("a", "c")
    ]
    one, other = (forecast(mix, PACK, seeds=(5,), warm_up=WARM_UP) for _ in range(2))
    assert one == other


def test_more_groups_leave_a_job_alone() -> None:
    found = forecast_mix(
        {"a": 2}, PAIRS, named("isolated"), cycles=400, seeds=(1,), warm_up=WARM_UP, groups=2
    )
    assert [each.job for each in found] == ["a 1", "a 2"]
    for each in found:
        assert each.mean_s == pytest.approx(each.alone_s, rel=0.05)


def test_an_exact_forecast_has_all_the_skill() -> None:
    mix = [PlannedJob(name=name, profile=profile(name), submit_s=0.0, cycles=30) for name in "ab"]
    found = forecast(mix, PACK, seeds=(1,), warm_up=WARM_UP)
    skill = skill_of(compare_forecast(found, {each.job: [each.mean_s] for each in found}))
    assert (skill.forecast.p95, skill.skill) == (0.0, 1.0)
    none = skill_of(compare_forecast(found, {each.job: [each.alone_s] for each in found}))
    assert none.skill == 0.0


def test_wrong_mixes_are_refused() -> None:
    common: dict[str, Any] = {"seeds": (1,), "warm_up": WARM_UP}
    with pytest.raises(InvalidRequestError, match="no jobs are given"):
        forecast([], PACK, **common)
    with pytest.raises(InvalidRequestError, match="z: the recordings have no such job"):
        forecast_mix({"z": 1}, PAIRS, PACK, cycles=20, **common)
    with pytest.raises(InvalidRequestError, match="plan more cycles than the 3 of warm-up"):
        forecast_mix({"a": 1}, PAIRS, PACK, cycles=2, **common)
    single = history([job("a", **A)], seed=1)
    with pytest.raises(InvalidRequestError, match="no context switch"):
        forecast_mix({"a": 2}, [single], PACK, cycles=20, **common)
    with pytest.raises(InvalidRequestError, match="has other jobs: d"):
        forecast_run(history([job("d", **A)], seed=1), PAIRS, PACK, **common)
    (found,), _ = recorded_jobs(single, warm_up=WARM_UP)
    with pytest.raises(InvalidRequestError, match="different operations or GPUs"):
        profile_of([found.job, replace(found.job, gpus=2)], warm_up=WARM_UP)


def test_the_commands_predict_a_recorded_run_and_a_planned_one(tmp_path: Path) -> None:
    paths = [str(tmp_path / f"{number}.json") for number in range(3)]
    run = history([job("a", **A), job("b", **B), job("c", **C)], seed=7)
    for path, each in zip(paths, (*PAIRS, run), strict=True):
        write_history(Path(path), replace(each, planning=HELD))
    sources = ["--from", paths[0], "--from", paths[1], "--seeds", "2"]
    told = CliRunner().invoke(app, ["fidelity", paths[2], *sources, "--json"])
    assert told.exit_code == 0, told.output
    values = json.loads(told.stdout)
    assert [each["job"] for each in values["jobs"]] == ["a", "b", "c"]
    assert values["error"]["p95"] < 0.06
    assert values["skill"] > 0.8
    shown = CliRunner().invoke(app, ["fidelity", paths[2], *sources], env={"COLUMNS": "200"})
    assert shown.exit_code == 0, shown.output
    assert "Error over 3 jobs" in shown.stdout
    planned = [
        "forecast",
        *paths[:2],
        "--job",
        "a=2",
        "--job",
        "c",
        "--cycles",
        "9",
        "--seeds",
        "1",
    ]
    told = CliRunner().invoke(app, [*planned, "--json"])
    assert told.exit_code == 0, told.output
    jobs = {each["job"]: each for each in json.loads(told.stdout)["jobs"]}
    assert set(jobs) == {"a 1", "a 2", "c"}
    assert all(each["mean_s"] > each["alone_s"] for each in jobs.values())
    shown = CliRunner().invoke(app, planned, env={"COLUMNS": "200"})
    assert shown.exit_code == 0, shown.output
    assert "a 1" in shown.stdout
    for wrong in ("a=0", "a=x", "=2"):
        refused = CliRunner().invoke(app, ["forecast", paths[0], "--job", wrong])
        assert refused.exit_code == 2, refused.output


def test_a_recording_holds_the_planning_of_its_cluster_and_a_given_policy_replaces_it() -> None:
    status = {"now": 1.0, "planning": planning(virtual_config(policy="pack", load_max=0.5))}
    run = history_of([], [], status)
    found = planning_of([run, run], None)
    assert (found.name, found.settings["load_max"]) == ("pack", 0.5)
    assert planning_of([run], "spread") == named("spread")
    by_fifo = {"now": 1.0, "planning": planning(virtual_config(**named("fifo-lock").settings))}
    assert planning_of([history_of([], [], by_fifo)], None).name == "fifo-lock"
    with pytest.raises(InvalidRequestError, match=r"different settings \(load_max\).*--policy"):
        planning_of([run, replace(run, planning=HELD)], None)
    with pytest.raises(InvalidRequestError, match="name the policy with --policy"):
        planning_of([replace(run, planning=None)], None)


def test_the_numbers_of_a_recorded_planning_keep_their_types(tmp_path: Path) -> None:
    write_history(tmp_path / "run.json", replace(PAIRS[0], planning=HELD))
    read = read_history(tmp_path / "run.json").planning
    assert read is not None
    assert {name: type(value) for name, value in read.items()} == {
        name: type(value) for name, value in HELD.items()
    }


def test_a_forecast_under_the_recorded_settings_is_that_of_the_policy_with_these_defaults() -> None:
    mix = [PlannedJob(name=name, profile=profile(name), submit_s=0.0, cycles=30) for name in "ac"]
    recorded = planning_of([replace(PAIRS[0], planning=HELD)], None)
    one, other = (forecast(mix, each, seeds=(5,), warm_up=WARM_UP) for each in (recorded, PACK))
    assert one == other
