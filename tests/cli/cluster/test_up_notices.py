"""What `plexrl up` says when the cluster is up: at a terminal, in a pipe, and as JSON."""

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from plexrl.cli.cluster.up.command import print_endpoint
from plexrl.cluster.data_dir.endpoint import Endpoint
from plexrl.cluster.join.authority import Authority
from plexrl.cluster.join.head import AUTHORITY_FOLDER

KEY = "very-secret"
URLS = "http://one:1,http://two:2"


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """A folder with the key, whose name a shell would divide."""
    folder = tmp_path / "a folder"
    folder.mkdir()
    (folder / "operator.key").write_text(KEY)
    return folder


def endpoint(data_dir: Path, **fields: Any) -> Endpoint:
    return Endpoint(url=URLS, api_key=KEY, pid=1, data_dir=str(data_dir), **fields)


def at_terminal(monkeypatch: pytest.MonkeyPatch, found: Endpoint, *, has_docs: bool = True) -> str:
    ours, theirs = os.openpty()
    with open(theirs, "w") as terminal, monkeypatch.context() as patched:  # noqa: PTH123 - a terminal
        patched.setattr(sys, "stdout", terminal)
        print_endpoint(found, as_json=False, has_docs=has_docs)
    said = b""
    # The terminal ends with an error once the other side is closed.
    with suppress(OSError):
        while part := os.read(ours, 1 << 16):
            said += part
    os.close(ours)
    return said.decode().replace("\r\n", "\n")


def exported(said: str) -> dict[str, str]:
    """The variables that a shell has after the lines that `up` prints."""
    lines = [line for line in said.splitlines() if line.startswith("  export ")]
    names = [line.split()[1].partition("=")[0] for line in lines]
    script = "\n".join([*lines, *(f'echo "${name}"' for name in names)])
    ran = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    return dict(zip(names, ran.stdout.splitlines(), strict=True))


VARIABLES = {
    "PLEXRL_URL": URLS,
    "PLEXRL_API_KEY": KEY,
    "TINKER_BASE_URL": "http://one:1",
    "TINKER_API_KEY": f"tml-{KEY}",
}


def test_a_terminal_gets_the_keys_themselves(
    monkeypatch: pytest.MonkeyPatch, data_dir: Path
) -> None:
    said = at_terminal(monkeypatch, endpoint(data_dir))
    assert said.startswith("PlexRL is up. Ctrl-C ends it.\n")
    assert f"PLEXRL_API_KEY={KEY} " in said
    assert exported(said) == VARIABLES
    assert f"  logs and state:    {data_dir}\n" in said
    assert "node" not in said, "no other machine can join"


def test_what_is_no_terminal_gets_commands_that_read_the_keys(
    capsys: pytest.CaptureFixture[str], data_dir: Path
) -> None:
    found = endpoint(data_dir, join_address="host:3")
    print_endpoint(found, as_json=False, has_docs=False)
    said = capsys.readouterr().out
    assert KEY not in said
    assert exported(said) == VARIABLES
    assert said.endswith(
        "\n\n`plexrl node token` prints the command that makes another machine a node.\n"
    )


def test_only_a_terminal_gets_a_token_that_admits_a_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], data_dir: Path
) -> None:
    Authority.open(data_dir / AUTHORITY_FOLDER)
    found = endpoint(data_dir, join_address="host:3")
    said = at_terminal(monkeypatch, found)
    assert "\nTo make another machine a node, within " in said
    assert "plexrl node join host:3\n" in said
    print_endpoint(endpoint(data_dir), as_json=False, has_docs=True)
    assert "node" not in capsys.readouterr().out, "no other machine can join"


def test_only_what_there_is_has_a_line(monkeypatch: pytest.MonkeyPatch, data_dir: Path) -> None:
    bare = at_terminal(monkeypatch, endpoint(data_dir), has_docs=False)
    assert not any(word in bare for word in ("GPUs", "documentation", "CA_FILE"))
    found = endpoint(data_dir, gpus="0-7, H100", ca="/the/ca.pem", public_url="https://far:9")
    whole = at_terminal(monkeypatch, found)
    assert "  GPUs of each node: 0-7, H100\n" in whole
    assert "  API documentation: http://one:1/docs\n" in whole
    assert exported(whole) == {
        **VARIABLES,
        "PLEXRL_URL": "https://far:9",
        "TINKER_BASE_URL": "https://far:9",
        "PLEXRL_CA_FILE": "/the/ca.pem",
    }


def test_json_says_where_the_key_is_and_not_what_it_is(
    capsys: pytest.CaptureFixture[str], data_dir: Path
) -> None:
    print_endpoint(endpoint(data_dir), as_json=True, has_docs=True)
    said = capsys.readouterr().out
    assert KEY not in said
    assert str(data_dir / "operator.key") in json.loads(said).values()
