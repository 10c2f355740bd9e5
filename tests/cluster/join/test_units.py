"""systemd units of heads and nodes."""

import shlex
import shutil
import subprocess
from configparser import ConfigParser
from pathlib import Path

import pytest
from typer.main import get_command

from plexrl.cli.app import app
from plexrl.cluster.node.systemd import unit_text
from tests.docs.pages import ROOT

UNITS = ROOT / "deploy" / "systemd"


def parsed(text: str) -> ConfigParser:
    found = ConfigParser(interpolation=None, strict=False)
    found.optionxform = str  # type: ignore[assignment,method-assign]  # as its documentation says
    found.read_string(text)
    return found


def checked(path: Path) -> str:
    """The command of ExecStart. The command line accepts it, and systemd the unit, if it is
    installed."""
    unit = parsed(path.read_text())
    words = shlex.split(unit["Service"]["ExecStart"].replace("%%", "%"))
    at = next(index for index, word in enumerate(words) if word.endswith("plexrl"))
    command, arguments, names = get_command(app), words[at + 1 :], []
    while hasattr(command, "commands"):
        name, *arguments = arguments
        names.append(name)
        command = command.commands[name]
    command.make_context("plexrl", list(arguments))
    analyze = shutil.which("systemd-analyze")
    if analyze is not None:
        done = subprocess.run(
            [analyze, "verify", str(path)], capture_output=True, text=True, check=False
        )
        ours = [line for line in done.stderr.splitlines() if path.name in line]
        assert (done.returncode, ours) == (0, [])
    return " ".join(names)


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("plexrl-head.service", "up"),
        ("plexrl-node.service", "node join"),
        ("plexrl-statemanager.service", "statemanager"),
    ],
)
def test_the_units_are_valid(name: str, command: str, tmp_path: Path) -> None:
    assert checked(Path(shutil.copy(UNITS / name, tmp_path))) == command


def test_a_units_stop_leaves_time_and_a_node_that_left_stays_away() -> None:
    node = parsed((UNITS / "plexrl-node.service").read_text())["Service"]
    assert (node["Restart"], node["TimeoutStopSec"]) == ("on-failure", "15min")


def test_a_written_unit_survives_strange_folders_and_needs_no_token(tmp_path: Path) -> None:
    folder = Path("/srv/100% sure/node")
    path = tmp_path / "plexrl-node.service"
    path.write_text(unit_text(folder, ["--name", "gpu7", "--gpus", "8"]))
    words = shlex.split(parsed(path.read_text())["Service"]["ExecStart"].replace("%%", "%"))
    assert checked(path) == "node join"
    assert words[1:] == [
        *("node", "join", "--name", "gpu7", "--gpus", "8", "--data-dir", str(folder))
    ]
