"""`plexrl simulate-rollout`: output for people and for programs."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from plexrl.cli.app import app, run_command
from plexrl.sim.rollout.setting import SystemName

DOCS = Path(__file__).parents[3] / "docs" / "simulating_rollouts.md"
SMALL = (
    *("--gpus", "8", "--batch", "4", "--group-size", "4", "--limit", "8000"),
    *("--steps", "4", "--warmup-steps", "1", "--workers", "1", "--rollout-gpus", "5"),
)


def shown(*arguments: str | Path, code: int = 0) -> str:
    found = CliRunner().invoke(
        app,
        ["simulate-rollout", *map(str, arguments)],
        env={"COLUMNS": "80", "TERM": "dumb"},
    )
    assert found.exit_code == code, found.output
    return found.stdout


def told(*arguments: str | Path) -> Any:
    return json.loads(shown(*arguments, "--json"))


def test_the_table_fits_eighty_columns_and_names_every_run() -> None:
    text = shown(*SMALL, "--staleness", "1,2")
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert "8 GPUs, 4 prompts of 4 responses" in lines[0]
    for name in ("sync", "staleflow"):
        assert any(line.startswith(name) for line in lines), name
    assert text.count("η=1") == text.count("η=2") == 1
    assert "times the tokens/s of sync, at most " in text


def test_the_figures_are_the_same_every_time_except_the_speed() -> None:
    first, again = (told(*SMALL, "--staleness", "1") for _ in range(2))
    assert first.pop("speed")[-1]["decision_ms"][0] > 0
    again.pop("speed")
    assert first == again


def test_gains_are_ratios_of_throughput() -> None:
    found = told(*SMALL, "--staleness", "1")
    rate = {run["system"]["name"]: run["throughput"] for run in found["runs"]}
    assert found["gains_over_sync"] == [1.0, pytest.approx(rate["staleflow"] / rate["sync"])]


def test_the_ablation_runs_every_subset_of_the_strategies() -> None:
    found = told(*SMALL, "--system", "staleflow", "--staleness", "2", "--ablation")
    labels = [run["label"] for run in found["runs"]]
    assert labels == [
        f"staleflow η=2{kind}" for kind in (" vanilla", " M", " S", " R", " SM", " RM", " RS", "")
    ]


ON_POLICY = (
    *("--gpus", "4", "--batch", "4", "--group-size", "4", "--limit", "8000", "--lengths", "r1"),
    *("--steps", "5", "--warmup-steps", "0", "--workers", "1", "--model", "qwen2.5-7b"),
)


def test_flexes_is_compared_by_the_time_for_the_same_prompts() -> None:
    asked = (*ON_POLICY, "--system", "sync,tail,flexes", "--rewards", "mixed")
    found = told(*asked)
    times = {run["label"]: run["run_s"] for run in found["runs"]}
    assert found["gains_over_sync"] == [
        pytest.approx(times["sync"] / times[name]) for name in ("sync", "tail", "flexes")
    ]
    assert not found["bounds"], "no system divides its GPUs"
    lines = shown(*asked).splitlines()
    assert max(map(len, lines)) <= 80
    ratio = f"{times['sync'] / times['flexes']:.2f}"
    assert f"flexes trains the prompts of sync {ratio} times as fast, 8,000 tokens" in lines


def test_the_ablation_of_flexes_switches_its_parts_off() -> None:
    found = told(*ON_POLICY, "--system", "flexes", "--ablation", "--over-launch", "1.5")
    labels = [run["label"] for run in found["runs"]]
    assert labels == [f"flexes{parts}" for parts in (" TR", " TRP", " R", " RS", "")]
    assert {run["system"]["over_launch_responses"] for run in found["runs"]} == {1.5}
    assert found["settings"][0]["model"]["name"] == "qwen2.5-7b"


def test_the_page_of_on_policy_runs_has_no_bound_of_a_split(tmp_path: Path) -> None:
    asked = ("--system", "sync,flexes", "--ablation", "--rewards", "mixed", "--out", tmp_path)
    shown(*ON_POLICY, *asked)
    page = (tmp_path / "report.html").read_text()
    assert "no split" not in page
    assert "of 1.7% of the prompts 30 s" in page
    assert "flexes trains the prompts of sync" in page
    assert "flexes, 4 instances" in page
    assert "flexes TR, 4 instances" not in page, "histories are those of all parts"


def test_out_gets_results_and_a_page_without_links(tmp_path: Path) -> None:
    text = shown(*SMALL, "--staleness", "1", "--limit", "4000,8000", "--out", tmp_path)
    assert "report.html" in text
    results = json.loads((tmp_path / "results.json").read_text())
    assert {run["limit"] for run in results["runs"]} == {4000, 8000}
    page = (tmp_path / "report.html").read_text()
    for element in ("throughput", "staleness", "load", "lanes"):
        assert f'<section id="{element}"' in page
    assert "src=" not in page
    assert "<link" not in page


def test_equal_runs_write_equal_pages(tmp_path: Path) -> None:
    for name in ("one", "two"):
        shown(*SMALL, "--staleness", "1", "--out", tmp_path / name)
    one, two = ((tmp_path / name / "report.html").read_bytes() for name in ("one", "two"))
    assert one == two


def test_a_trace_and_costs_of_the_user_are_read(tmp_path: Path) -> None:
    lengths, costs = tmp_path / "lengths.csv", tmp_path / "costs.json"
    lengths.write_text("output_tokens\n500\n500\n")
    costs.write_text('{"pull_s": 0.0, "train_fixed_s": 2.0}')
    found = told(*SMALL, "--system", "sync", "--lengths", lengths, "--costs", costs)
    assert found["runs"][0]["response_tokens"] == 500
    assert found["settings"][0]["costs"]["train_fixed_s"] == 2.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--system", "verl"), "--system 'verl': use sync"),
        (("--staleness", "x"), "--staleness x: give whole numbers"),
        (("--limit", "-5"), "--limit -5: give numbers of at least 0"),
        (("--limit", "0"), "limit is 0: give at least 1"),
        (("--limit", "300000"), "does not fit a KV cache"),
        (("--gpus", "8", "--rollout-gpus", "8"), "8 rollout GPUs of 8: give 1 to 7"),
        (("--steps", "4", "--warmup-steps", "4"), "4 warm-up steps of 4"),
        (("--lengths", "bundled:philly"), "contains jobs"),
        (("--costs", "/nowhere.json"), "cannot read costs from /nowhere.json"),
        (("--out", "/dev/null"), "is not a folder"),
        (("--rewards", "slow"), "--rewards 'slow': use at-once or mixed"),
        (("--rewards", "mixed"), "staleflow knows no rewards that take time: use sync, tail"),
        (("--model", "gpt-2"), "--model 'gpt-2': use qwen2.5-7b"),
        (("--model", "qwen2.5-7b", "--costs", "x.json"), "both give latencies"),
        (("--model", "qwen2.5-7b", "--tensor-parallel", "16"), "give 1 to 8"),
        (("--tensor-parallel", "2"), "give a model"),
        (("--system", "flexes"), "the parallelism planner needs"),
        (
            ("--system", "tail", "--over-launch", "0.5"),
            "--over-launch is 0.5; it must be a number, at least 1 and at most 16",
        ),
    ],
)
def test_a_question_that_cannot_be_answered_says_why(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["plexrl", "simulate-rollout", *arguments])
    assert run_command(lambda: app(standalone_mode=False)) == 1
    assert message in capsys.readouterr().err.replace("\n", " ")


def test_the_page_of_the_docs_names_every_option_and_system() -> None:
    page = DOCS.read_text()
    command: Any = typer.main.get_command(app).commands["simulate-rollout"]  # type: ignore[attr-defined]
    options = {option for each in command.params for option in each.opts if option != "--help"}
    systems = {f"`{name.value}`" for name in SystemName}
    assert not {word for word in options | systems if word not in page}
