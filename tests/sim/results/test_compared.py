"""Comparison of two results of `plexrl simulate`: settings and figures."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from plexrl.cli.app import app
from plexrl.errors import InvalidRequestError
from plexrl.sim.results.compared import FIGURES, OPTIONS, compare_results
from plexrl.traces import write_jobs
from tests.sim.search.test_sweep import FewJobs


def plexrl(*arguments: str | Path) -> Any:
    return CliRunner().invoke(
        app, [*map(str, arguments)], env={"COLUMNS": "80", "TERM": "dumb"}, catch_exceptions=True
    )


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of results: of two policies on two sizes, and of a search."""
    folder = tmp_path_factory.mktemp("results")
    trace = folder / "few.csv"
    write_jobs(trace, FewJobs().jobs())
    asked: dict[str, list[str]] = {
        "small": ["--nodes", "4", "--policy", "isolated,pack"],
        "large": ["--nodes", "6", "--policy", "pack,spread", "--staleness", "1"],
        "both": ["--sweep", "nodes=4:6:2", "--policy", "pack"],
        "search": ["--policy", "pack", "--slo", "wait.p95<=2h", "--max-nodes", "8"],
    }
    for name, options in asked.items():
        found = plexrl("simulate", trace, *options, "--workers", "1", "--out", folder / name)
        assert found.exit_code == 0, found.output
    return {name: folder / name for name in asked}


def document(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return found


def test_what_is_asked_otherwise_is_said_by_its_option(results: dict[str, Path]) -> None:
    found = compare_results(document(results["small"]), document(results["large"]))
    assert {each.name: (each.a, each.b) for each in found.settings} == {
        "--nodes": ((4,), (6,)),
        "--policy": (("isolated", "pack"), ("pack", "spread")),
        "--staleness": ((None,), (1,)),
    }
    assert (found.only_a, found.only_b, found.warnings) == (("isolated",), ("spread",), ())
    [pair] = found.pairs
    assert (pair.label, pair.a, pair.b) == ("pack", 1, 0)


def test_figures_are_those_of_the_runs_and_their_differences(results: dict[str, Path]) -> None:
    a, b = document(results["small"]), document(results["large"])
    [pair] = compare_results(a, b).pairs
    drain = next(each for each in pair.figures if each.name == "drain")
    was, now = a["runs"][1]["result"]["drain_s"], b["runs"][0]["result"]["drain_s"]
    assert (drain.a, drain.b, drain.difference) == (was, now, now - was)
    assert drain.change == pytest.approx(now / was - 1)
    assert {each.name for each in pair.figures} == set(FIGURES)
    wait = next(each for each in pair.figures if each.name == "failed jobs")
    assert (wait.difference, wait.change) == (0.0, None)


def test_runs_of_a_sweep_are_paired_where_the_other_has_their_like(
    results: dict[str, Path],
) -> None:
    found = compare_results(document(results["both"]), document(results["large"]))
    assert [(pair.label, pair.a, pair.b) for pair in found.pairs] == [("pack, nodes 6", 1, 0)]
    assert found.only_a == ("pack, nodes 4",)
    assert found.only_b == ("spread, nodes 6",)


def test_sizes_that_were_searched_for_are_figures_and_no_question(
    results: dict[str, Path],
) -> None:
    a = document(results["search"])
    b = copy.deepcopy(a)
    b["smallest"][0]["nodes"] += 2
    b["runs"][0]["scenario"]["pools"][0]["nodes"] += 2
    found = compare_results(a, b)
    assert found.settings == ()
    [pair] = found.smallest
    assert (pair.label, pair.figures[0].difference) == ("pack", 2.0)


def test_objectives_of_a_search_are_part_of_the_question(results: dict[str, Path]) -> None:
    a = document(results["search"])
    b = copy.deepcopy(a)
    b["smallest"][0]["objectives"] = ["wait.p95<=1h"]
    b["runs"][0]["result"]["cost"] += 1.0
    found = compare_results(a, b)
    [asked] = found.settings
    assert (asked.name, asked.b) == ("--slo", ("wait.p95<=1h",))
    assert found.warnings == ()
    c = copy.deepcopy(a)
    c["smallest"] = []
    [asked] = compare_results(a, c).settings
    assert (asked.name, asked.b) == ("--slo", (None,))


def test_unlike_things_are_compared_with_a_warning(results: dict[str, Path]) -> None:
    a = document(results["small"])
    b = copy.deepcopy(a)
    b["trace"]["jobs"] += 1
    b["version"] = "0.0.1"
    b["failed"] = [{"error": {}}]
    jobs, version, failed = compare_results(a, b).warnings
    assert "the jobs differ (jobs 6 and 7)" in jobs
    assert "0.0.1" in version
    assert "1 runs of B failed" in failed
    c = copy.deepcopy(a)
    c["runs"][0]["result"]["cost"] += 1.0
    [told] = compare_results(a, c).warnings
    assert "the settings are equal but the figures differ" in told


def test_results_without_a_figure_or_a_version_can_be_compared(results: dict[str, Path]) -> None:
    a = document(results["small"])
    b = copy.deepcopy(a)
    del b["version"], b["runs"][1]["result"]["worst_tenant"]
    found = compare_results(a, b)
    worst = next(each for each in found.pairs[1].figures if each.name == "worst tenant")
    assert worst.b is None
    assert worst.difference is None
    assert any("unknown" in each for each in found.warnings)


def test_every_option_stands_for_a_part_of_a_scenario_that_there_is() -> None:
    from plexrl.cli.simulate.command import simulate

    named = simulate.__annotations__
    for option in OPTIONS.values():
        name = option.removeprefix("--").replace("-", "_")
        assert option == "TRACE" or {"from": "layout"}.get(name, name) in named


def test_the_command_shows_differences_and_nothing_where_there_are_none(
    results: dict[str, Path],
) -> None:
    found = plexrl("simulate", "compare", results["small"], results["large"])
    assert found.exit_code == 0, found.output
    for word in ("Different settings", "--staleness", "B - A", "drain", "Only in A: isolated"):
        assert word in found.stdout
    assert max(map(len, found.stdout.splitlines())) <= 80
    same = plexrl("simulate", "compare", results["small"], results["small"] / "results.json")
    assert same.exit_code == 0
    assert "The settings are equal." in same.stdout
    assert "pack: equal figures." in same.stdout
    assert "B - A" not in same.stdout


def test_the_command_answers_programs_in_json(results: dict[str, Path]) -> None:
    found = plexrl("simulate", "compare", results["small"], results["large"], "--json")
    told = json.loads(found.stdout)
    assert {each["name"] for each in told["settings"]} == {"--nodes", "--policy", "--staleness"}
    drain = next(each for each in told["pairs"][0]["figures"] if each["name"] == "drain")
    assert drain["difference"] == drain["b"] - drain["a"]


def test_a_trace_called_compare_is_given_by_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("compare").write_text("job_id\n")
    found = plexrl("simulate", "./compare")
    assert isinstance(found.exception, InvalidRequestError)
    assert "compare" in found.exception.message


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "cannot be read"),
        ("job_id,submit_s\n", "is not JSON"),
        ('{"runs": []}', "is not a results.json"),
        ('{"trace": {}, "runs": []}', "has no completed run"),
        ('{"trace": {}, "runs": [{"scenario": {}}]}', "is not a results.json"),
    ],
)
def test_what_is_no_result_is_refused(
    results: dict[str, Path], tmp_path: Path, content: str | None, told: str
) -> None:
    path = tmp_path / "other.json"
    if content is not None:
        path.write_text(content)
    found = plexrl("simulate", "compare", results["small"], path)
    assert isinstance(found.exception, InvalidRequestError)
    assert told in found.exception.message


def test_results_without_a_run_in_common_are_refused(
    results: dict[str, Path], tmp_path: Path
) -> None:
    other = document(results["both"])
    for run in other["runs"]:
        run["scenario"]["policy"] = "sjf"
    path = tmp_path / "other.json"
    path.write_text(json.dumps(other))
    found = plexrl("simulate", "compare", results["small"], path)
    assert isinstance(found.exception, InvalidRequestError)
    assert "no run of" in found.exception.message
