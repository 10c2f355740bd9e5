"""Nodes on addresses of their own that share no folder, joined to a head over mutual TLS.

They are on one machine, so a StateManager of another node is reached at its Unix socket.
`tests/hosts` has nodes without any common file system.
"""

import hashlib
import json
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import plexrl
from plexrl.wire.links.credentials import Role, TlsFiles
from tests.certificates import TestAuthority
from tests.free_ports import free_port

OPERATOR_KEY = "plx-operator"
END_S = 30.0
GIB = 1 << 30
PORTS_EACH = 64


def as_plain(files: TlsFiles) -> dict[str, str]:
    return {"ca": files.ca, "certificate": files.certificate, "key": files.key}


@dataclass
class Machine:
    """A node: its StateManager, its agent, and folders that no other process is told of."""

    name: str
    host: str
    folder: Path
    agent: "subprocess.Popen[str]" = field(init=False)
    statemanager: "subprocess.Popen[str]" = field(init=False)
    agent_config: dict[str, Any] = field(init=False)

    def lose(self) -> None:
        """Kill all its processes."""
        for process in (self.agent, self.statemanager):
            process.kill()
            process.wait()

    def start_agent(self, stack: ExitStack) -> None:
        """Start the agent, for the first time or again."""
        self.agent, _ = _start(stack, self.folder, "worker", self.agent_config)


@dataclass
class Machines:
    """A head with a scheduler and a router, and its nodes."""

    url: str
    nodes: list[Machine]
    folder: Path
    stack: ExitStack

    def connect(self) -> plexrl.Cluster:
        return plexrl.connect(self.url, OPERATOR_KEY)


@contextmanager
def machines(nodes: int = 2, gpus: int = 1, **scheduler: Any) -> Iterator[Machines]:
    """A cluster of `nodes` nodes at 127.0.0.2, 127.0.0.3, ..."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/tmp", prefix="m-")))
        authority = TestAuthority(folder)
        address = f"tls://127.0.0.1:{free_port()}"
        head = folder / "head"
        _start(
            stack,
            head,
            "scheduler",
            {
                "listen": [address],
                "journal": str(head / "journal.sqlite"),
                "operator_key_digest": hashlib.sha256(OPERATOR_KEY.encode()).hexdigest(),
                "tls": as_plain(authority.files(Role.SCHEDULER)),
                **scheduler,
            },
        )
        _, ready = _start(
            stack,
            head,
            "router",
            {
                "router": "r",
                "scheduler": [address],
                "host": "127.0.0.1",
                "port": 0,
                "data_dir": str(head / "data"),
                "tls": as_plain(authority.files(Role.ROUTER, "r")),
            },
        )
        found = Machines(f"http://127.0.0.1:{ready['port']}", [], folder, stack)
        for index in range(nodes):
            machine = Machine(f"n{index}", f"127.0.0.{index + 2}", folder / f"n{index}")
            _start_node(stack, machine, address, authority, gpus)
            found.nodes.append(machine)
        yield found


def _start_node(
    stack: ExitStack, machine: Machine, scheduler: str, authority: TestAuthority, gpus: int
) -> None:
    data, run = machine.folder / "data", machine.folder / "run"
    memory = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="m-"))
    stack.callback(shutil.rmtree, memory, ignore_errors=True)
    for each in (data, run):
        each.mkdir(parents=True)
    key = data / "ticket.key"
    # One key for all nodes: StateManagers accept each other's workers.
    shared_key = machine.folder.parent / "ticket.key"
    if shared_key.exists():
        shutil.copy(shared_key, key)
        key.chmod(0o600)
    first = free_port(PORTS_EACH)
    tls = as_plain(authority.files(Role.NODE, machine.name))
    machine.statemanager, _ = _start(
        stack,
        machine.folder,
        "statemanager",
        {
            "node": machine.name,
            "listen": str(run / "sm.sock"),
            "host_dir": str(memory),
            "host_bytes": GIB // 2,
            "nvme_dir": str(data / "nvme"),
            "nvme_bytes": GIB,
            "checkpoint_url": str(data / "checkpoints"),
            "ticket_key_file": str(key),
            "serve_tcp": f"{machine.host}:{first}",
            "tls": tls,
            "fabric": "trusted",
        },
    )
    if not shared_key.exists():
        shutil.copy(key, shared_key)
    machine.agent_config = {
        "node": machine.name,
        "scheduler": [scheduler],
        "statemanager": str(run / "sm.sock"),
        "ticket_key_file": str(key),
        "gpus": gpus,
        "gpu_memory_bytes": GIB,
        "host_memory_bytes": GIB // 2,
        "nvme_bytes": GIB,
        "run_dir": str(run),
        "rendezvous_dir": str(run),
        "data_dir": str(data),
        "host": machine.host,
        "ports": [first + 1, first + PORTS_EACH - 1],
        "statemanager_address": f"tcp://{machine.host}:{first}",
        "tls": tls,
        "fabric": "trusted",
    }
    machine.start_agent(stack)


def _start(
    stack: ExitStack, folder: Path, module: str, config: dict[str, Any]
) -> tuple["subprocess.Popen[str]", dict[str, Any]]:
    folder.mkdir(parents=True, exist_ok=True)
    path, log_path = folder / f"{module}.json", folder / f"{module}.log"
    path.write_text(json.dumps(config))
    with log_path.open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", f"plexrl.{module}", "--config", str(path)],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    stack.callback(_end, process)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert '"ready"' in line, line + log_path.read_text()
    return process, json.loads(line)


def _end(process: "subprocess.Popen[str]") -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    assert process.stdout is not None
    process.stdout.close()
