"""Hosts whose wall clocks differ, by libfaketime: each host's processes see a time of their own.

The monotonic clocks of simulated hosts differ anyhow.
"""

import re
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.hosts.cluster import HostCluster
from tests.hosts.host import REPOSITORY, Host
from tests.hosts.network import Network

HEAD, AHEAD, BEHIND = 3.0, 14.0, -8.0
"""Hours. The nodes are 11 h from the head, of 12 h allowed, and 22 h from each other."""
CERTIFICATE = HostCluster.node_data_dir / "certificates" / "current" / "node.pem"
RENEWAL_S = 120.0
RESIGN = """
import sys
from pathlib import Path
from plexrl.cluster.join.authority import Authority
from plexrl.wire.links.credentials import Identity, Role
authority = Authority.open(Path(sys.argv[1]))
identity = Identity(Role.NODE, sys.argv[2])
sys.stdout.write(authority.sign(sys.stdin.read().encode(), identity).decode())
"""
REQUEST = """
import sys
from pathlib import Path
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
key = serialization.load_pem_private_key(Path(sys.argv[1]).read_bytes(), None)
name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "plexrl")])
request = x509.CertificateSigningRequestBuilder().subject_name(name).sign(key, hashes.SHA256())
sys.stdout.write(request.public_bytes(serialization.Encoding.PEM).decode())
"""


@pytest.fixture
def library() -> str:
    """The path of libfaketime."""
    found = find_spec("libfaketime")
    if found is None or found.origin is None:
        pytest.skip("libfaketime is missing: pip install libfaketime")
    (path,) = Path(found.origin).parent.rglob("libfaketime.so.1")
    return str(path)


def set_clock(host: Host, library: str, hours: float) -> None:
    """From now on processes that start on the host see this machine's time plus some hours."""
    host.variables = {
        "LD_PRELOAD": library,
        "FAKETIME": f"{hours:+g}h",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }


class ClockCluster(HostCluster):
    """Nodes join once their clocks are set; before, they are refused with the same token."""

    def __init__(self, network: Network, library: str) -> None:
        self._library = library
        super().__init__(network, gpus=2)

    def start_store(self) -> None:
        """Nothing: S3 refuses clocks that differ by more than 15 minutes."""

    def start_head(self) -> None:
        command = ["plexrl", "up", "--json", "--tls", "--host", "0.0.0.0", "--nodes", "0"]
        started = self.head.start(*command, "--advertise", self.head.name)
        self._supervisors[self.head.name] = started

    def start_nodes(self) -> None:
        token = self.ask("node", "token", "--show-key", "--uses", "2")["token"]
        for node, hours in zip(self.nodes, (AHEAD, BEHIND), strict=True):
            too_far = 1.5 if hours > HEAD else -1.5
            set_clock(node, self._library, hours + too_far)
            self.start_node(node, token)
            refused = self.supervisor(node)
            assert refused.wait(60) != 0
            side = "ahead of" if hours > HEAD else "behind"
            assert f"s {side} the head's" in refused.text()
            assert "timedatectl" in refused.text()
            set_clock(node, self._library, hours)
            self.start_node(node, token)
        for node in self.nodes:
            self.supervisor(node).wait_for('"node"')


@pytest.fixture
def cluster(three_hosts: Network, library: str) -> Iterator[ClockCluster]:
    set_clock(three_hosts["head"], library, HEAD)
    made = ClockCluster(three_hosts, library)
    yield made
    made.end()


def train(cluster: ClockCluster) -> None:
    """Run a job whose actor has ranks on both nodes of two GPUs."""
    script = str(REPOSITORY / "examples" / "grpo_digits.py")
    words = (script, "--workers", "3", "--warm-up-steps", "3", "--steps", "2")
    done = cluster.head.run("python", *words, env=cluster.environment, timeout_s=300)
    assert re.search(r"held-out reward [\d.]+ after 2 steps", done.stdout + done.stderr)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_nodes_22_hours_apart_join_train_and_renew_and_those_beyond_12_from_the_head_are_refused(
    cluster: ClockCluster, library: str
) -> None:
    hours = {"head": HEAD, "a": AHEAD, "b": BEHIND}
    for host in cluster.network:
        # Each host really has a clock of its own.
        shown = float(host.run("python", "-c", "import time; print(time.time())").stdout)
        mine = float(cluster.head.run("python", "-c", "import time; print(time.time())").stdout)
        assert round((shown - mine) / 3600) == hours[host.name] - HEAD
    train(cluster)
    former = {}
    for node in cluster.nodes:
        cluster.supervisor(node).end()
        # As the head signed it 20 days and 12 hours ago: it is due by every host's clock.
        request = node.run("python", "-c", REQUEST, str(CERTIFICATE.with_suffix(".key"))).stdout
        set_clock(cluster.head, library, HEAD - 24 * 20 - 12)
        authority = str(cluster.data_dir / "authority")
        old = cluster.head.run("python", "-c", RESIGN, authority, node.name, stdin=request).stdout
        set_clock(cluster.head, library, HEAD)
        node.path(CERTIFICATE).write_text(old)
        former[node.name] = old
        cluster.start_node(node)
    for node in cluster.nodes:
        cluster.supervisor(node).wait_for('"node"')
        deadline = time.monotonic() + RENEWAL_S
        while node.path(CERTIFICATE).read_text() == former[node.name]:
            assert time.monotonic() < deadline, f"{node.name} has not renewed its certificate"
            time.sleep(0.1)
    train(cluster)
