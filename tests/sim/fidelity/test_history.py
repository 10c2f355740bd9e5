"""A recorded history is predicted group by group."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from plexrl.cli.app import app
from plexrl.errors import InvalidRequestError
from plexrl.sim.fidelity.history import fidelity_of
from plexrl.sim.fidelity.planning import named
from plexrl.traces import TraceJob
from plexrl.traces.convert.history import History, history_of, read_history, write_history
from tests.sim.fidelity.test_fidelity import row, simulated, some_job, view

PACK = named("pack")


def recorded(jobs: Sequence[TraceJob], **changes: Any) -> History:
    """What a cluster remembers of a simulated run, whose control plane takes no time."""
    views, rows = simulated(jobs, seed=3)
    return history_of(views, [{"group": "g1", **each, **changes} for each in rows], {"now": 1e9})


SHARERS = (some_job("a", rollout_s=1.0), some_job("b", rollout_s=1.3, submit_s=0.4))


def test_a_history_predicts_itself_whatever_else_is_recorded(tmp_path: Path) -> None:
    history = recorded(SHARERS)
    strange = history_of(
        [
            {**view("two"), **REST, "deployments": 2 * view("two")["deployments"]},
            {**view("idle"), **REST},
            {**view("brief"), **REST},
            {**view("moved"), **REST},
        ],
        [
            {**row("forward", 0.0, 0.0, 1.0, 0.9), "deployment": "brief/actor", "group": "g2"},
            {**row("forward", 0.0, 0.0, 1.0, 0.9), "deployment": "moved/actor", "group": "g2"},
            {**row("forward", 2.0, 2.0, 3.0, 0.9), "deployment": "moved/actor", "group": "g3"},
        ],
        status={"now": 1e9},
    )
    whole = replace(
        history,
        jobs=history.jobs + strange.jobs,
        operations=history.operations + strange.operations,
    )
    path = tmp_path / "run.json"
    assert write_history(path, whole) == 6
    assert read_history(path) == whole
    found = fidelity_of(read_history(path), PACK, seeds=(1,), warm_up=3)
    (group,) = found.groups
    assert group.group == "g1"
    assert len(group.recorded.cycles) == 2 * 17
    assert group.recorded.errors.p95 < 1e-6
    assert group.recorded.alone_errors.mean > 0.01, "nobody has waited: this shows nothing"
    assert {job.job for job in group.drawn} == {"a", "b"}
    reasons = {each.job: each.reason for each in found.left_out}
    assert "2 training deployments" in reasons["two"]
    assert "the log has no operations" in reasons["idle"]
    assert "of its 1 whole cycles" in reasons["brief"]
    assert "groups g2, g3" in reasons["moved"]


def test_a_reference_of_the_job_changes_no_prediction() -> None:
    history = recorded(SHARERS[:1])
    (job,) = history.jobs
    reference = replace(job.deployments[0], deployment="a/reference", kind="forward", workers=3)
    forward = next(each for each in history.operations if each.kind == "forward")
    longest = replace(forward, deployment="a/reference", finished_at=1e6, group="g2")
    both = replace(
        history,
        jobs=(replace(job, deployments=(*job.deployments, reference)),),
        operations=(*history.operations, longest),
    )
    found, wanted = (fidelity_of(each, PACK, seeds=(1,), warm_up=3) for each in (both, history))
    assert found == wanted


def test_what_the_control_plane_adds_comes_from_a_run_alone_where_there_is_one() -> None:
    history = recorded(SHARERS)
    # Runs that held their group a second longer than they computed, in a busier hour.
    alone = recorded(SHARERS)
    longer = replace(
        alone,
        operations=tuple(
            replace(each, compute_s=(each.compute_s or 0.0) - 0.05) for each in alone.operations
        ),
    )
    plain = fidelity_of(history, PACK, seeds=(1,), warm_up=3)
    told = fidelity_of(history, PACK, alone=longer, seeds=(1,), warm_up=3)
    for one, other in zip(plain.groups[0].recorded.jobs, told.groups[0].recorded.jobs, strict=True):
        assert other.alone_s == pytest.approx(one.alone_s + 3 * 0.05)


def test_groups_are_predicted_each_for_itself_and_jobs_of_one_name_by_their_ids() -> None:
    one, other = recorded(SHARERS[:1]), recorded(SHARERS[:1], group="g2")
    job = replace(
        other.jobs[0],
        job="another",
        deployments=(replace(other.jobs[0].deployments[0], deployment="d"),),
    )
    both = replace(
        one,
        jobs=(*one.jobs, job),
        operations=(
            *one.operations,
            *(replace(each, deployment="d") for each in other.operations),
        ),
    )
    found = fidelity_of(both, PACK, seeds=(1,), warm_up=3)
    assert [group.group for group in found.groups] == ["g1", "g2"]
    assert [group.recorded.jobs[0].job for group in found.groups] == ["a (a)", "a (another)"]


def test_the_command_says_it_in_a_table_and_in_json(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_history(path, recorded(SHARERS))
    told = CliRunner().invoke(
        app, ["fidelity", str(path), "--alone", str(path), "--json", "--policy", "pack"]
    )
    assert told.exit_code == 0, told.output
    values = json.loads(told.stdout)
    (group,) = values["groups"]
    assert group["cycles"] == 34
    assert group["error"]["p95"] < 1e-6 < group["alone_error"]["mean"]
    for job in group["jobs"]:
        assert job["predicted_s"] == pytest.approx(job["measured_s"])
        assert job["law_s"] == pytest.approx(job["measured_s"]["median"], rel=0.5)
    shown = CliRunner().invoke(
        app, ["fidelity", str(path), "--policy", "pack"], env={"COLUMNS": "200"}
    )
    assert shown.exit_code == 0, shown.output
    assert "Group g1" in shown.stdout
    assert "Error over 34 cycles" in shown.stdout


def test_what_is_no_recording_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    with pytest.raises(InvalidRequestError, match="cannot be read"):
        read_history(path)
    for text in (
        "{",
        "{}",
        '{"format": "plexrl-history/2", "now": 1, "jobs": [], "operations": []}',
    ):
        path.write_text(text)
        with pytest.raises(InvalidRequestError, match="not a recording"):
            read_history(path)
    with pytest.raises(InvalidRequestError, match="none of the recording's jobs"):
        fidelity_of(history_of([], [], {"now": 0.0}), PACK, seeds=(1,), warm_up=0)
    with pytest.raises(InvalidRequestError, match="cannot be written"):
        write_history(tmp_path, recorded(SHARERS[:1]))


REST = {"tenant": "", "priority": 0, "state": "RUNNING", "ended_at": None}
