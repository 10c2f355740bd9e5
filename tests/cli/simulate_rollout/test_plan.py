"""`plexrl plan-rollout`: output for people and for programs."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import plexrl
from plexrl.cli.app import app, run_command
from tests.sim.rollout.test_plan import PROFILE

QUICK = ("--staleness", "1", "--seeds", "1", "--workers", "1")


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    path.write_text(PROFILE.to_json())
    return path


def shown(*arguments: str | Path) -> str:
    words = ["plan-rollout", *map(str, arguments)]
    found = CliRunner().invoke(app, words, env={"COLUMNS": "80", "TERM": "dumb"})
    assert found.exit_code == 0, found.output
    return found.stdout


def test_the_table_fits_eighty_columns_and_ends_with_what_to_write(profile: Path) -> None:
    lines = shown(profile, *QUICK).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("4 prompts of 2 samples, 22 measured")
    for name in ("sync", "tail", "streamrl-sync", "streamrl-async", "staleflow η=1"):
        assert any(line.startswith(name) for line in lines), name
    assert any(line.startswith("Best, ") for line in lines)
    code = next(line.strip() for line in lines if line.strip().startswith("policy="))
    policy = eval(code.removeprefix("policy=").split(", shares")[0], {"plexrl": plexrl})
    assert isinstance(policy, plexrl.RolloutPolicy)


def test_json_has_every_mode_with_its_settings(profile: Path) -> None:
    found = json.loads(shown(profile, *QUICK, "--json"))
    for each in found["modes"]:
        assert {"gain", "spread", "tensor_parallel", "rollout_gpus", "train_gpus"} <= set(each)
        assert each["mode"]["python"]
        assert each["mode"]["is_on_policy"] == (each["mode"]["system"]["staleness"] == 0)


def test_every_line_of_python_makes_a_policy() -> None:
    from plexrl.sim.rollout.plan.modes import modes

    for each in modes([1, 2, 3], has_model=True):
        code = each.python[0].removeprefix("policy=")
        for other in (", shares_gpus", ", tp_sizes"):
            code = code.partition(other)[0]
        policy = eval(code, {"plexrl": plexrl})
        assert getattr(policy, "staleness", 0) == each.system.staleness


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("missing.json",), "missing.json cannot be read"),
        (("{}", "--gpu-type", "a40"), "--gpu-type is of --model"),
        (("{}", "--model", "gpt"), "--model 'gpt'"),
    ],
)
def test_mistakes_are_refused(
    profile: Path, words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(profile) if each == "{}" else each for each in words]
    assert run_command(lambda: app(["plan-rollout", *arguments], standalone_mode=False)) == 1
    assert message in capsys.readouterr().err
