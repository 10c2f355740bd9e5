"""Figures are compared with their bars, and the page of results says which are missed."""

import subprocess
from pathlib import Path

import pytest

from benchmarks import bars, run_all
from benchmarks.bars import Bar
from benchmarks.run_all import Output, commands, results_page, run_once, verdicts


def output(**figures: float) -> Output:
    return Output(printed="a table", found={"figures": figures, "seconds": 1.0}, failed=False)


@pytest.mark.parametrize(
    ("value", "verdict"),
    [(1.9, "met"), (2.0, "met"), (4.0, "met, aim missed"), (5.1, "missed"), (None, "not measured")],
)
def test_a_figure_has_a_bar_and_beyond_it_an_aim(value: float | None, verdict: str) -> None:
    assert Bar(figure="added_p50_ms", bar="<= 5", aim="<= 2").verdict(value) == verdict


def test_every_bar_is_of_a_benchmark() -> None:
    assert set(bars.bars()) <= set(commands())


def test_a_bar_that_is_no_comparison_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "bars.toml"
    path.write_text('["engine.py"]\nspeed = { bar = "more than 2" }\n')
    monkeypatch.setattr(bars, "BARS", path)
    with pytest.raises(ValueError, match="'more than 2' is no bar"):
        bars.bars()


def test_the_page_names_what_is_missed_and_what_was_not_measured() -> None:
    rows = verdicts({"execution.py": output(added_p50_ms=9.5, payload_ratio=0.8)})
    found = {figure: (value, verdict) for _, figure, value, _, _, verdict, _ in rows}
    assert found["added_p50_ms"] == ("9.5", "**missed**")
    assert found["payload_ratio"] == ("0.8", "met")
    assert found["events_per_s"] == ("", "**not measured**")
    assert "| **missed** |" in results_page({"execution.py": output(added_p50_ms=9.5)})


def test_a_benchmark_that_is_run_alone_keeps_the_results_of_the_others() -> None:
    outputs = run_all.recorded()
    page = results_page(outputs)
    assert len(outputs) > 30
    for name, each in outputs.items():
        assert f"## `benchmarks/{name}`\n\n```\n{each.printed}\n```" in page
        assert each.found.get("commit") or name.startswith("gpu/")


def test_a_benchmark_that_does_not_exist_is_named_with_those_that_do() -> None:
    with pytest.raises(SystemExit, match=r"no such benchmark: fault\.py; there are .*faults\.py"):
        run_all.chosen(["fault.py"])
    assert list(run_all.chosen(["faults.py"])) == ["faults.py"]
    assert "simulating/drain.py" not in run_all.chosen([])


def test_results_of_a_tree_with_changes_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / "changed.py").touch()
    monkeypatch.setattr(run_all, "QUICK", False)
    monkeypatch.setattr(run_all, "ROOT", tmp_path)
    monkeypatch.setattr("sys.argv", ["run_all"])
    with pytest.raises(SystemExit, match=r"commit these changes first.*\n.*changed\.py"):
        run_all.main()


def test_a_run_that_goes_on_repeats_only_what_has_not_succeeded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def run(words: list[str]) -> Output:
        ran.extend(words)
        return Output(printed="a table", found={"figures": {}}, failed=len(ran) == 1)

    monkeypatch.setattr(run_all, "run", run)
    first, *others = (run_once("state/nvme.py", ["nvme"], tmp_path / "commit") for _ in range(3))
    assert first.failed
    assert ran == ["nvme", "nvme"]
    assert others[0] == others[1]
    assert not others[0].failed
