"""The whole demo with few steps."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from plexrl.cli.demo.run import DemoOptions, run_demo


@pytest.mark.slow
def test_the_demo_trains_both_jobs_both_ways_with_the_same_rewards(tmp_path: Path) -> None:
    said = io.StringIO()
    run_demo(DemoOptions(out=tmp_path, steps=4), Console(file=said, width=120))
    body = json.loads((tmp_path / "report.json").read_text())
    assert [job["name"] for job in body["jobs"]] == ["sort", "reverse"]
    assert all(job["steps"] == 4 for job in body["jobs"])
    assert body["same_rewards"] is True
    assert body["same_weights"] is True
    assert len({job["weights"] for job in body["shared"]["jobs"]}) == 2
    assert "identical to each alone" in said.getvalue()
    assert "/dashboard" in said.getvalue()
    assert body["shared"]["groups"] == 1
    assert body["isolated"]["groups"] == 2
    assert body["shared"]["context_switches"] >= 4
    assert body["isolated"]["context_switches"] == 0
    assert "context switches" in said.getvalue()
