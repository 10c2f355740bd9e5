"""StateManagers and ranks on simulated hosts, with certificates of one cluster."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from plexrl.cluster.join.authority import Authority
from plexrl.statemanager.config import StateManagerConfig
from plexrl.statemanager.protocol.network import remote_address
from plexrl.wire.links.credentials import Identity, Role, TlsFiles
from tests.hosts.host import Host, HostProcess
from tests.statemanager.hosts.rank import Setup

HOME = "/root/node"
LISTEN = f"{HOME}/sm.sock"
KEY_FILE = f"{HOME}/ticket.key"
PORT = 7411
MIB = 1 << 20
TICKET_KEY = bytes(range(32))
READY_S = 60.0


class Rank:
    """A rank's process."""

    def __init__(self, process: HostProcess, setup: Setup) -> None:
        self.process = process
        self.setup = setup
        self._asked = 0

    def ask(self, order: str, **arguments: Any) -> int:
        """Give an order; returns its number."""
        self._asked += 1
        self.process.send(json.dumps({"order": order, **arguments}) + "\n")
        return self._asked

    def answer(self, number: int, timeout_s: float = READY_S) -> dict[str, Any]:
        """Wait for the answer to an order."""
        line = self.process.wait_for(f"answer {number} ", timeout_s)
        found: dict[str, Any] = json.loads(line.split(" ", 2)[2])
        return found

    def do(self, order: str, timeout_s: float = READY_S, **arguments: Any) -> dict[str, Any]:
        """Give an order and wait for its answer, which must be no error."""
        found = self.answer(self.ask(order, **arguments), timeout_s)
        assert "error" not in found, found
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A host with its StateManager."""

    host: Host
    config: StateManagerConfig
    daemon: HostProcess
    address: str
    """The address that its agent announces."""

    def rank(self, **fields: Any) -> Rank:
        """Start a rank's process."""
        setup = Setup(
            listen=LISTEN,
            key_file=KEY_FILE,
            fabric=self.config.fabric,
            tls=self.config.tls,
            **{"rank": 0, "world_size": 1, "split": None, **fields},
        )
        text = msgspec.json.encode(setup).decode()
        process = self.host.start("python", "-m", "tests.statemanager.hosts.rank", text)
        rank = Rank(process, setup)
        rank.answer(0)
        return rank

    def limit_sending(self, bits_per_s: str) -> None:
        """Limit the rate at which the host sends, as `tc` writes rates."""
        self.host.run(
            *("tc", "qdisc", "replace", "dev", "eth0", "root", "tbf"),
            *("rate", bits_per_s, "burst", "256k" if "mbit" in bits_per_s else "4m"),
            *("latency", "100ms"),
        )

    def received_bytes(self) -> int:
        """Bytes that the host's network interface has received."""
        lines = self.host.run("cat", "/proc/net/dev").stdout.splitlines()
        [row] = [line for line in lines if line.strip().startswith("eth0:")]
        return int(row.partition(":")[2].split()[0])


def start_nodes(
    hosts: Sequence[Host], authority: Path, *, fabric: str = "", host_bytes: int = 256 * MIB
) -> list[Node]:
    """A StateManager on each host, at the same paths everywhere."""
    issuer = Authority.open(authority)
    return [_start(host, issuer, authority, fabric, host_bytes) for host in hosts]


def _start(host: Host, authority: Authority, folder: Path, fabric: str, host_bytes: int) -> Node:
    home = host.path(HOME)
    home.mkdir(exist_ok=True, mode=0o700)
    made = authority.issue(folder / "made", Identity(Role.NODE, host.name), ())
    files = TlsFiles(ca=f"{HOME}/ca.pem", certificate=f"{HOME}/node.pem", key=f"{HOME}/node.key")
    for name in ("ca", "certificate", "key"):
        target = host.path(getattr(files, name))
        target.write_bytes(Path(getattr(made, name)).read_bytes())
        target.chmod(0o600)
    host.path(KEY_FILE).write_bytes(TICKET_KEY)
    host.path(KEY_FILE).chmod(0o600)
    config = StateManagerConfig(
        node=host.name,
        listen=LISTEN,
        host_dir="/dev/shm/plexrl",
        host_bytes=host_bytes,
        nvme_dir=f"{HOME}/nvme",
        nvme_bytes=host_bytes,
        ticket_key_file=KEY_FILE,
        serve_tcp=f"{host.address}:{PORT}",
        tls=files,
        fabric=fabric,
    )
    daemon = start_daemon(host, config)
    remote = remote_address(host.name, host.address, PORT, fabric=fabric)
    # As its own agent announces it: the directory is looked at from inside of the host.
    program = (
        "import sys; from plexrl.statemanager.protocol.address import announced; "
        "print(announced(sys.argv[1], sys.argv[2]))"
    )
    address = host.run("python", "-c", program, LISTEN, remote).stdout.strip()
    return Node(host=host, config=config, daemon=daemon, address=address)


def start_daemon(host: Host, config: StateManagerConfig) -> HostProcess:
    """Start a StateManager; returns once it serves."""
    text = msgspec.json.encode(config).decode()
    daemon = host.start("python", "-m", "plexrl.statemanager", "--config-json", text)
    daemon.wait_for('"ready"', READY_S)
    return daemon
