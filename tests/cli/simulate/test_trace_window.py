"""`--start-day` and `--days` choose a window of a trace."""

import json
from pathlib import Path

from typer.testing import CliRunner

from plexrl.cli.app import app


def test_a_window_of_a_trace_begins_at_its_day(tmp_path: Path) -> None:
    path = tmp_path / "days.csv"
    rows = "".join(f"j{day},{86_400 * day},8,600\n" for day in range(10))
    path.write_text("job_id,submit_s,gpus,duration_s\n" + rows)
    window = ["--start-day", "3", "--days", "1.5", "--nodes", "1", "--workers", "1", "--json"]
    made = CliRunner().invoke(app, ["simulate", str(path), *window])
    found = json.loads(made.stdout)
    assert found["trace"]["jobs"] == 2
    assert found["runs"][0]["scenario"]["source"]["shape"]["start_s"] == 3 * 86_400.0
