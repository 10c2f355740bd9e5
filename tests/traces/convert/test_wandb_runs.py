"""Exports of runs become the cycles of their steps."""

import json
from pathlib import Path
from random import Random

import pytest

from plexrl.errors import InvalidRequestError, TraceError
from plexrl.traces import MODEL_CLASSES, RunProfile, read_jobs, read_runs, write_jobs

VERL = ("timing_s/gen", "timing_s/old_log_prob", "timing_s/update_actor", "timing_s/step")


def verl_rows(steps: int) -> list[dict[str, float]]:
    """Steps of 100 s or so: 70 rollout, 8 log_prob, 20 update, 2 that nobody measured; the first is
    slow, every tenth is evaluated, and one straggles."""
    random = Random(1)
    found = []
    for step in range(steps):
        slow = 5.0 if step == 0 or step == 7 else 1.0
        times = [slow * mean * random.uniform(0.99, 1.01) for mean in (70.0, 8.0, 20.0)]
        testing = 50.0 if step % 10 == 0 else 0.0
        row = dict(zip(VERL, [*times, sum(times) + 2.0 + testing], strict=True))
        row["timing_s/testing"] = testing
        row["actor/grad_norm"] = 0.3
        found.append(row)
    return found


def check(profile: RunProfile) -> None:
    assert profile.period_s == pytest.approx(100.0, rel=0.01)
    assert 0 < profile.jitter_s < 3.0
    assert [segment.function for segment in profile.segments] == ["log_prob", "update"]
    log_prob, update = profile.segments
    assert log_prob.duration_s == pytest.approx(8.0, rel=0.01)
    assert update.duration_s == pytest.approx(20.0, rel=0.01)
    # What no phase explains is with the rollout, in front.
    assert log_prob.offset_s == pytest.approx(72.0, rel=0.01)


def test_a_history_in_csv_becomes_a_profile(tmp_path: Path) -> None:
    rows = verl_rows(40)
    names = list(rows[0])
    lines = [",".join(["_step", *names])]
    for step, row in enumerate(rows):
        lines.append(",".join([str(step), *(str(row[name]) for name in names)]))
        lines.append(",".join([str(step), *("" for _ in names)]))
    path = tmp_path / "history.csv"
    path.write_text("\n".join(lines) + "\n")
    [profile] = read_runs(path)
    assert profile.steps == 39
    check(profile)


def test_a_history_in_json_lines_becomes_the_same(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    lines = [json.dumps({"_step": at, **row, "text": None}) for at, row in enumerate(verl_rows(40))]
    path.write_text("\n".join(lines) + "\n")
    [profile] = read_runs(path)
    check(profile)


def test_a_chart_of_two_runs_becomes_two_profiles(tmp_path: Path) -> None:
    rows = verl_rows(20)
    columns = [
        f"{run} - {name}{end}" for run in ("a-1", "b - 2") for name in VERL for end in ("", "__MAX")
    ]
    lines = [",".join(['"Step"', *(f'"{name}"' for name in columns)])]
    lines += [
        ",".join(
            [str(at), *(str(row[name] * scale) for scale in (1, 2) for name in VERL for _ in "ab")]
        )
        for at, row in enumerate(rows)
    ]
    path = tmp_path / "chart.csv"
    path.write_text("\n".join(lines) + "\n")
    one, other = read_runs(path)
    assert (one.run, other.run) == ("a-1", "b - 2")
    check(one)
    assert other.period_s == pytest.approx(2 * one.period_s)


def test_the_published_profile_gives_its_published_bubble(tmp_path: Path) -> None:
    """PlexRL Tab. 1: 80.10 %, 70.67 % and 81.11 % of a cycle; 1 - busy / cycle is within half a
    point for 7B and 30B, and 81.11 for 235B."""
    for name, bubble in (("7B", 0.8010), ("30B", 0.7067), ("235B", 0.8111)):
        model = MODEL_CLASSES[name]
        path = tmp_path / f"{name}.csv"
        row = f"{model.period_s},{model.log_prob_s},{model.update_s},{model.sync_s}"
        path.write_text(f"cycle_time,compute_log_prob,update_actor,sync_weight\n{row}\n{row}\n")
        [profile] = read_runs(path)
        busy_s = sum(segment.duration_s for segment in profile.segments)
        assert 1 - busy_s / profile.period_s == pytest.approx(bubble, abs=0.005)
        functions = [segment.function for segment in profile.segments]
        assert functions == ["log_prob", "update", "sync"]
        job = profile.job(gpus=model.gpus, job_id=name)
        write_jobs(tmp_path / "run.csv", [job])
        assert list(read_jobs(tmp_path / "run.csv")) == [job]


def test_metrics_of_ones_own_can_be_named(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text("gen,train,iter\n30,10,45\n30,10,45\n")
    with pytest.raises(TraceError, match="no metric of a training phase"):
        read_runs(path)
    named = {"gen": "rollout", "train": "update", "iter": "step"}
    [profile] = read_runs(path, metrics=named)
    assert (profile.period_s, profile.phases) == (45.0, (("rollout", 30.0), ("update", 10.0)))
    with pytest.raises(InvalidRequestError, match="not a name of letters"):
        read_runs(path, metrics={"gen": "roll out"})


def test_faults_of_an_export_are_told(tmp_path: Path) -> None:
    path = tmp_path / "history.csv"
    path.write_text("timing_s/gen,timing_s/update_actor\n30,10\n30,fast\n-3,10\n31,11\n1\n")
    with pytest.raises(TraceError) as error:
        read_runs(path)
    problems = error.value.details["problems"]
    assert isinstance(problems, list)
    assert [(each["line"], each["field"]) for each in problems] == [
        (3, "timing_s/update_actor"),
        (4, "timing_s/gen"),
        (6, ""),
    ]
    [profile] = read_runs(path, skip_bad=True)
    assert profile.period_s == 42.0
    empty = tmp_path / "empty.csv"
    empty.write_text("timing_s/gen,timing_s/update_actor\n,\n")
    with pytest.raises(TraceError, match="no step"):
        read_runs(empty)


def test_two_runs_of_one_name_in_a_chart_are_told_whatever_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "chart.csv"
    column = "run - timing_s/update_actor"
    path.write_text(f"Step,{column},{column}\n0,1,2\n1,1,2\n")
    with pytest.raises(TraceError, match="update_actor is repeated in the header"):
        read_runs(path, skip_bad=True)
