"""`plexrl plan-rollout`: output for people and for programs."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

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
    assert any(line.strip().startswith("policy=plexrl.") for line in lines)


def test_json_has_every_mode_with_its_settings(profile: Path) -> None:
    found = json.loads(shown(profile, *QUICK, "--json"))
    for each in found["modes"]:
        assert {"gain", "spread", "tensor_parallel", "rollout_gpus", "train_gpus"} <= set(each)
        assert each["mode"]["python"][0].startswith("policy=plexrl.")
        assert each["mode"]["is_on_policy"] == (each["mode"]["system"]["staleness"] == 0)


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
