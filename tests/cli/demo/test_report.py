"""The demo's figures follow from the cluster's operation log."""

import json
from hashlib import sha256
from pathlib import Path

import pytest

from plexrl.cli.demo.measure import (
    JobResult,
    PhaseResult,
    count_switches,
    measure_phase,
    union_seconds,
)
from plexrl.cli.demo.report import DemoResult, report_json, saving, saving_of_all_gpus, write_report
from plexrl.cli.demo.run import digest_of
from plexrl.errors import ExecutionError
from plexrl.ids import JobId
from plexrl.wire.messages.node_queries import CheckpointView


def job(name: str, start: float, end: float) -> JobResult:
    return JobResult(
        name=name,
        tenant=f"{name}-owner",
        job=f"{name}-1",
        submitted_at=start,
        ended_at=end,
        train_deployment=f"{name}-1/actor",
        workers=2,
        steps=10,
        reward_before=0.25,
        reward_after=0.75,
        rewards=((1, 1.0, 0.5), (2, 2.0, 0.6)),
        weights=f"{name}0" * 32,
        gpus=frozenset({("n", 0), ("n", 1), ("n", 2 if name == "a" else 3)}),
    )


def row(
    deployment: str, kind: str, start: float | None, end: float | None, **more: object
) -> dict[str, object]:
    return {
        "deployment": deployment,
        "kind": kind,
        "state": "finished",
        "started_at": start,
        "finished_at": end,
        "compute_s": None if start is None or end is None else end - start,
        "group": "g1",
        "token": 1,
        **more,
    }


def shared_phase() -> PhaseResult:
    rows = [
        row("a-1/actor", "load", 0, 1),
        row("a-1/actor", "forward_backward", 1, 3),
        row("a-1/actor", "offload", 4, 4.5, token=2),
        row("b-1/actor", "load", 4.5, 5, token=2),
        row("b-1/actor", "forward_backward", 5, 8, token=2),
        row("c-1/actor", "forward_backward", 0, 100),
    ]
    return measure_phase("shared", [job("a", 0, 10), job("b", 2, 12)], rows)


def isolated_phase() -> PhaseResult:
    rows = [
        row("a-1/actor", "forward_backward", 1, 3, group="g2"),
        row("b-1/actor", "forward_backward", 9, 12, group="g3"),
    ]
    return measure_phase("isolated", [job("a", 0, 8), job("b", 8, 16)], rows)


def test_a_shared_group_is_reserved_once_however_many_use_it() -> None:
    phase = shared_phase()
    assert (phase.groups, phase.worker_seconds) == (1, 24.0)
    assert phase.worker_seconds_per_step == pytest.approx(1.2)
    assert phase.busy_share == pytest.approx(2 * 5 / 24)


def test_isolated_groups_are_reserved_each_for_its_own_job() -> None:
    phase = isolated_phase()
    assert (phase.groups, phase.worker_seconds) == (2, 32.0)
    assert saving(shared_phase(), phase) == pytest.approx(0.25)


def test_all_gpus_count_from_their_first_job_to_their_last() -> None:
    shared, isolated = shared_phase(), isolated_phase()
    # Two for training over twelve seconds, and a rollout's for ten of each job.
    assert shared.gpus == 4
    assert shared.gpu_seconds_per_step == pytest.approx((24 + 20) / 20)
    # Three for each job, though it ran alone.
    assert isolated.gpus == 6
    assert isolated.gpu_seconds_per_step == pytest.approx(48 / 20)
    assert saving_of_all_gpus(shared, isolated) == pytest.approx(1 - 44 / 48)


def test_a_switch_is_an_offload_and_the_load_it_made_room_for() -> None:
    assert count_switches(
        [
            row("a", "load", 0, 5),
            row("a", "offload", 6, 7, token=2),
            row("b", "load", 7, 9, token=2),
        ]
    ) == (1, 3.0)


def test_overlapping_stretches_count_once() -> None:
    assert union_seconds([(0, 2), (1, 3), (5, 6)]) == 4.0
    assert union_seconds([]) == 0.0


def test_the_report_has_its_figures_page_and_plots(tmp_path: Path) -> None:
    result = DemoResult(
        shared=shared_phase(), isolated=isolated_phase(), machine="test", versions="0"
    )
    page = write_report(result, tmp_path)
    body = json.loads((tmp_path / "report.json").read_text())
    assert body == report_json(result)
    assert set(body["jobs"][0]) == {"name", "tenant", "reward_before", "reward_after", "steps"}
    for phase in ("shared", "isolated"):
        assert {"worker_seconds_per_step", "context_switches", "switch_seconds"} <= set(body[phase])
    assert body["same_rewards"] is True
    assert "25&nbsp;%" in page.read_text()
    for plot in ("timeline.png", "rewards.png"):
        assert (tmp_path / plot).read_bytes().startswith(b"\x89PNG")


def checkpoint(name: str, folder: Path) -> CheckpointView:
    return {
        "job": JobId("a-1"),
        "name": name,
        "path": str(folder),
        "state": "durable",
        "seq": 1,
        "step": 1,
        "bytes_done": 1,
        "bytes_total": 1,
        "seconds": 1.0,
        "as_of": 1.0,
        "error": None,
    }


def test_a_checkpoint_without_weights_is_no_equal_one(tmp_path: Path) -> None:
    empty = checkpoint("final", tmp_path)
    with pytest.raises(ExecutionError, match="no weights to compare"):
        digest_of([])
    with pytest.raises(ExecutionError, match="no weights to compare"):
        digest_of([empty])
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    other = checkpoint("other", tmp_path / "none")
    assert digest_of([other, empty]) == sha256(b"weights").hexdigest()
