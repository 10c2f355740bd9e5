"""A head and nodes as processes of this machine, each with addresses and a data directory of its
own."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import plexrl
from plexrl.cluster.join.authority import Authority
from plexrl.cluster.join.head import AUTHORITY_FOLDER
from plexrl.cluster.join.ledger import Ledger
from plexrl.cluster.join.tokens import create_token

HEAD_HOST = "127.0.0.2"
DEADLINE_S = 120.0
COMMAND = (sys.executable, "-m", "plexrl.cli.app")


def run(*arguments: str, fails: bool = False) -> dict[str, Any]:
    """The JSON object that a command prints; with `fails`, the error that it must report."""
    found = run_any(*arguments, fails=fails)
    assert isinstance(found, dict)
    return dict(found["error"]) if fails else found


def run_any(*arguments: str, fails: bool = False) -> object:
    """The JSON that a command prints, which must fail or not."""
    done = subprocess.run(
        [*COMMAND, *arguments, "--json"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        env=_environment(),
    )
    assert done.returncode == int(fails), (done.stdout, done.stderr)
    found: object = json.loads(done.stdout)
    return found


class Running:
    """One `plexrl up` or `plexrl node join`."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.data_dir = folder
        self._errors = (folder.parent / f"{folder.name}.err").open("a")
        self.process = subprocess.Popen(
            [*COMMAND, *arguments, "--data-dir", str(folder), "--json"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=_environment(),
        )

    def ready(self) -> dict[str, Any]:
        """What it prints once it serves."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, (self.data_dir.parent / f"{self.data_dir.name}.err").read_text()
        found: dict[str, Any] = json.loads(line)
        assert "error" not in found, found
        if "key_file" in found:
            found["api_key"] = Path(found["key_file"]).read_text()
        return found

    def kill(self) -> None:
        """End it as a crash of the machine's supervisor does."""
        self.process.send_signal(signal.SIGKILL)
        self.close()

    def end(self) -> int:
        """Ask it to end; returns its exit status."""
        if self.process.poll() is None:
            self.process.terminate()
        return self.close()

    def close(self) -> int:
        """Wait for its end."""
        status = self.process.wait(DEADLINE_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._errors.close()
        return status


class Machines:
    """A head, and the nodes that have joined it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.head: Running | None = None
        self.found: dict[str, Any] = {}
        self.nodes: dict[str, Running] = {}
        self._numbers: dict[str, int] = {}
        """Last part of each node's address."""

    def start_head(self, *arguments: str) -> None:
        """Start or restart the head; without arguments it has no node of its own."""
        self.head = Running(
            self._folder / "head",
            *("up", "--tls", "--host", HEAD_HOST, "--join-port", "0", "--scheduler-port", "0"),
            *("--policy", "pack", *(arguments or ("--nodes", "0"))),
        )
        self.found = self.head.ready()

    @property
    def head_dir(self) -> Path:
        """The head's data directory."""
        return self._folder / "head"

    def token(self, uses: int = 1) -> str:
        """A new token."""
        folder = self.head_dir / AUTHORITY_FOLDER
        fingerprint = Authority.open(folder).fingerprint
        return str(create_token(Ledger(folder), fingerprint, uses=uses)[0])

    def _token_file(self, name: str) -> str:
        path = self._folder / f"{name}.token"
        path.write_text(self.token())
        return str(path)

    def cli_token(self) -> str:
        """A new token, as an operator makes it."""
        return str(run("node", "token", "--show-key", "--data-dir", str(self.head_dir))["token"])

    def node_dir(self, name: str) -> Path:
        """A node's data directory."""
        return self._folder / name

    def start_node(
        self, name: str, *arguments: str, gpus: int | None = 1, host_memory: str = "256MiB"
    ) -> Running:
        """Start a node, with a token at its first start; does not wait for it. `gpus`: the number
        of virtual GPUs; None: the machine's own."""
        number = self._numbers.setdefault(name, 3 + len(self._numbers))
        is_first = not (self.node_dir(name) / "node.json").exists()
        entry = (
            (self.found["join_address"], "--token-file", self._token_file(name), "--name", name)
            if is_first
            else ()
        )
        host = ("--host", f"127.0.0.{number}") if is_first else ()
        running = Running(
            self.node_dir(name),
            *("node", "join", *entry, *host, "--fabric", "trusted"),
            *(() if gpus is None else ("--virtual-gpus", str(gpus))),
            *("--host-memory", host_memory, *arguments),
        )
        self.nodes[name] = running
        return running

    def connect(self) -> plexrl.Cluster:
        """The cluster, as the operator."""
        return plexrl.connect(self.found["url"], self.found["api_key"], ca=self.found["ca"])

    def wait_for_live(self, *names: str) -> None:
        """Wait until exactly these nodes are alive."""
        with self.connect() as cluster:

            def live() -> set[str]:
                return {each["node"] for each in cluster.nodes() if each["alive"]}

            wait_until(lambda: live() == set(names), lambda: f"live nodes: {live()}")

    def close(self) -> None:
        """End everything."""
        for running in (*self.nodes.values(), *([self.head] if self.head else [])):
            if running.process.poll() is None:
                running.end()


def wait_until(what: Callable[[], bool], message: Callable[[], str]) -> None:
    """Poll until `what` holds; fails after the deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while not what():
        assert time.monotonic() < deadline, message()
        time.sleep(0.1)


def _environment() -> dict[str, str]:
    hidden = ("PLEXRL_URL", "PLEXRL_API_KEY", "PLEXRL_DATA_DIR", "PLEXRL_CA_FILE", "COLUMNS")
    found = {name: value for name, value in os.environ.items() if name not in hidden}
    return {**found, "OMP_NUM_THREADS": "1"}
