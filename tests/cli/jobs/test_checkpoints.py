"""`plexrl checkpoints`: a row for each at a terminal and in a pipe, and what failed."""

import json
from typing import Any

import pytest

from plexrl.cli.jobs.checkpoints import show
from plexrl.cli.terminal.context import Output
from plexrl.ids import JobId
from plexrl.wire.messages.node_queries import CheckpointView

JOB = JobId("math-grpo-caf8d00a")


def checkpoint(name: str, **fields: Any) -> CheckpointView:
    view: CheckpointView = {
        "job": JOB,
        "name": name,
        "path": f"/data/checkpoints/{JOB}/{name}",
        "state": "durable",
        "seq": 3,
        "step": 12,
        "bytes_done": 4 << 20,
        "bytes_total": 4 << 20,
        "seconds": 2.0,
        "as_of": 0.0,
        "error": None,
    }
    return {**view, **fields}  # type: ignore[typeddict-item]  # of its own fields


FOUND = [
    checkpoint("whole"),
    checkpoint("half", state="writing", bytes_done=1 << 20),
    checkpoint("bad", state="failed", error={"code": "storage_full", "message": "no\x1b[2Jroom"}),
]


def test_a_pipe_gets_a_line_for_each_with_its_whole_path(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    show(FOUND, Output())
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["job", "name", "step", "state", "size", "when", "path"]
    assert [row.split()[:4] for row in rows[:3]] == [
        [JOB, "whole", "12", "durable"],
        [JOB, "half", "12", "writing"],
        [JOB, "bad", "12", "failed"],
    ]
    assert [row.split()[-1] for row in rows[:3]] == [each["path"] for each in FOUND]
    sizes = [" ".join(row.split()[4:-3]) for row in rows[:3]]
    assert sizes == ["4.0 MiB", "1.0 MiB of 4.0 MiB", "4.0 MiB"]
    assert rows[3:] == [rf"{JOB} bad: no\u001b[2Jroom"]


def test_a_narrow_terminal_gets_a_block_for_each_and_breaks_no_path(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    show(FOUND, Output())
    said = capsys.readouterr().out.splitlines()
    assert [line.split() for line in said if line.startswith("path")] == [
        ["path", each["path"]] for each in FOUND
    ]
    assert said.count("size   1.0 MiB of 4.0 MiB") == 1


def test_json_is_the_views_alone(capsys: pytest.CaptureFixture[str]) -> None:
    show(FOUND, Output(as_json=True))
    assert json.loads(capsys.readouterr().out) == FOUND
