"""Every command of the documentation's code blocks succeeds (`make docs-check`)."""

import signal
import subprocess

import pytest

from tests.docs.conftest import Docs
from tests.docs.exceptions import PARSED, substituted
from tests.docs.pages import Command, commands, typed

pytestmark = pytest.mark.slow

PRINTING_KEYS = (
    ["plexrl", "tenants", "create"],
    ["plexrl", "keys", "create"],
    ["plexrl", "node", "token"],
)
"""Commands that print a secret, which need an option where the output is no terminal."""


def exception(command: Command) -> str | None:
    """The entry of `PARSED` that excludes the command, if any."""
    return next((text for text in PARSED if f"{command.text} ".startswith(text)), None)


@pytest.mark.parametrize(
    "command",
    [command for command in commands() if exception(command) is None],
    ids=lambda command: command.name,
)
def test_a_command_of_a_page_succeeds(docs: Docs, command: Command) -> None:
    words = substituted(command.words, docs.placeholders(command.words))
    if words[:3] in PRINTING_KEYS:
        # A reader types it at a terminal.
        words = [*words[:3], "--show-key", *words[3:]]
    if words[:2] == ["plexrl", "up"]:
        serves(docs, words)
        return
    pipeline = ["bash", "-o", "pipefail", "-c", typed(words)]
    found = subprocess.run(
        pipeline, cwd=docs.folder, env=docs.environment, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.strip(), "it prints nothing"


def serves(docs: Docs, words: list[str]) -> None:
    """Check that the cluster starts, and that Ctrl-C ends it in order."""
    environment = {**docs.environment, "PLEXRL_DATA_DIR": str(docs.folder / "own")}
    with subprocess.Popen(
        words, cwd=docs.folder, env=environment, stdout=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        assert "PlexRL is up" in running.stdout.readline()
        running.send_signal(signal.SIGINT)
        running.stdout.read()
    assert running.returncode == 0


def test_every_exception_matches_a_command() -> None:
    used = {exception(command) for command in commands()}
    assert set(PARSED) == used - {None}
