"""A part that cannot run says why: on standard output to its parent, and in its log."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from plexrl.process.children.startup import EXIT_REFUSED


@pytest.mark.parametrize(
    "module",
    [
        *("scheduler", "router", "worker", "rollout", "runs", "statemanager"),
        "cluster.kubernetes.workers",
    ],
)
def test_a_part_reports_a_configuration_that_it_refuses(module: str, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"bogus": 1}')
    ended = subprocess.run(
        [sys.executable, "-m", f"plexrl.{module}", "--config", str(config)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == EXIT_REFUSED, ended.stderr
    assert json.loads(ended.stdout)["error"]["code"] == "invalid_request"
    assert "Traceback" not in ended.stderr
    assert f"plexrl.{module} cannot run: " in ended.stderr
    assert "remove the unknown fields bogus" in ended.stderr
