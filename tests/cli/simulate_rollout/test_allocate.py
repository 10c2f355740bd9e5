"""`plexrl allocate-rollout`: GPUs for generation and for training, by their price."""

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from plexrl.cli.app import app, run_command

JOB = ("--lengths", "r1", "--limit", "8000", "--batch", "8", "--group-size", "4")
SMALL = ("h800=8", "h20=8", "--trainer-gpus", "2", *JOB)


def shown(*arguments: str) -> str:
    words = ["allocate-rollout", *arguments]
    found = CliRunner().invoke(app, words, env={"COLUMNS": "80", "TERM": "dumb"})
    assert found.exit_code == 0, found.output
    return found.stdout


def told(*arguments: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(shown(*arguments, "--json"))["allocations"]
    return found


def test_the_table_fits_eighty_columns_and_has_every_way() -> None:
    lines = shown(*SMALL).splitlines()
    assert max(map(len, lines)) <= 80
    ways = [" ".join(line.split()[:2]) for line in lines[2:]]
    assert ways[-1] == "least cost"
    assert sorted(ways[:-1]) == ["one datacenter"] * 2 + ["two datacenters"] * 2


def test_each_way_keeps_its_budgets_and_the_least_cost_is_the_least() -> None:
    *found, least = told(*SMALL)
    for each in found:
        assert each["instances"] <= 8
        assert each["trainers"] * 2 <= 8
        if each["way"] == "one datacenter":
            assert each["generation"] == each["training"]
            assert each["instances"] + each["trainers"] * 2 <= 8
        else:
            # The slower stage has all of its budget.
            full = {"generation_s": each["instances"] == 8, "training_s": each["trainers"] == 4}
            assert full["generation_s"] or full["training_s"]
        assert each["step_s"] == max(each["generation_s"], each["training_s"])
    assert least["step_s"] <= max(each["step_s"] for each in found)
    assert least["samples_per_cost"] >= max(each["samples_per_cost"] for each in found)
    # What StreamRL finds of these kinds (§7.3).
    assert (least["generation"], least["training"]) == ("h20", "h800")


def test_a_limit_on_the_step_costs() -> None:
    *found, slow = told(*SMALL)
    limit = min(each["step_s"] for each in found)
    fast = told(*SMALL, "--step-s", str(limit))[-1]
    assert fast["step_s"] <= limit < slow["step_s"]
    assert fast["samples_per_cost"] <= slow["samples_per_cost"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("h900=8",), "'h900=8': use each of h800, h100, h20, a40 once at most"),
        (("h800=8", "h800=8"), "once at most"),
        (("a40=8",), "the price is not known: give a40=8@PRICE"),
        (("h800=many",), "give KIND=COUNT or KIND=COUNT@PRICE"),
        (("h800=8", "--model", "gpt"), "--model 'gpt'"),
        (("h800=1", *JOB), "no GPUs of these kinds run a step"),
        ((*SMALL, "--step-s", "0.001"), "no GPUs of these kinds run a step in 0.001 s"),
    ],
)
def test_mistakes_are_refused(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(lambda: app(["allocate-rollout", *words], standalone_mode=False)) == 1
    assert message in capsys.readouterr().err
