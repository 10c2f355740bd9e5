"""StateManagers of nodes that do not trust the network between them."""

import contextlib
import random
import socket
import ssl
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from plexrl.errors import (
    AuthenticationError,
    InvalidRequestError,
    PermissionDeniedError,
    PlexRLError,
    UnavailableError,
)
from plexrl.statemanager.client.migration import migrate
from plexrl.statemanager.protocol.network import NO_NETWORK, Network
from plexrl.statemanager.protocol.tickets import AGENT, TicketKey
from plexrl.statemanager.protocol.tickets import TicketRole as TicketRole
from plexrl.statemanager.transfer.transport.handshake import greet_server
from plexrl.statemanager.transfer.transport.tcp.client import TcpConnection
from plexrl.statemanager.transfer.transport.tcp.state import open_states
from plexrl.wire.framing import encode_head
from plexrl.wire.links.address import TlsAddress
from plexrl.wire.links.credentials import Credentials, Role, TlsFiles
from plexrl.wire.links.dial import BLOCKING_HANDSHAKES_MAX
from tests.certificates import TestAuthority
from tests.half_open import half_open, is_ended
from tests.statemanager.client.test_migration import NAME, offloaded
from tests.statemanager.conftest import (
    DEADLINE_S,
    MIB,
    NETWORK,
    Daemon,
    MakeShard,
    StartDaemon,
)
from tests.statemanager.weight_sync import Rank, fsdp, tensor_parallel

TIMEOUT_S = 10.0
READER = "job/rollout"


@pytest.fixture
def authority(tmp_path: Path) -> TestAuthority:
    return TestAuthority(tmp_path / "cluster")


@pytest.fixture
def start_node(start_daemon: StartDaemon, authority: TestAuthority) -> StartDaemon:
    """Starts daemons that serve by TLS, each with the certificate of its node."""

    def start(name: str = "gpu0", **changes: object) -> Daemon:
        files = authority.files(Role.NODE, name)
        fields = {"node": name, "tls": files, "fabric": "", "serve_tcp": "127.0.0.1:0", **changes}
        return start_daemon(**fields)

    return start


@pytest.fixture
def node(start_node: StartDaemon) -> Daemon:
    return start_node()


@pytest.fixture
def trainers(node: Daemon) -> Iterator[list[Rank]]:
    """Version 1 is published on two ranks."""
    ranks = [Rank(node, "job/actor", rank, fsdp(rank, 2)) for rank in range(2)]
    for rank in ranks:
        rank.publish(1)
    yield ranks
    for rank in ranks:
        rank.close()


@pytest.fixture
def network(authority: TestAuthority) -> Network:
    """As another node has it."""
    return Network(authority.credentials(Role.NODE, "gpu1"))


def endpoint(node: Daemon) -> tuple[str, int]:
    host, _, port = node.tcp.rpartition("@")[2].rpartition(":")
    return host, int(port)


def agent_connection(node: Daemon, network: Network) -> TcpConnection:
    return TcpConnection(network, node.tcp, node.ticket(role=TicketRole.AGENT), TIMEOUT_S)


def check_serves(node: Daemon, network: Network) -> None:
    """It answers a node with a valid ticket."""
    with contextlib.closing(agent_connection(node, network)) as connection:
        assert connection.ask({"type": "confirm"}) == {}


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_slices_of_another_layout_come_encrypted_each_byte_once(
    start_node: StartDaemon, trainers: list[Rank], network: Network, dtype: str
) -> None:
    source = trainers[0].daemon
    assert source.tcp.startswith("tls://gpu0@127.0.0.1:")
    target = start_node("gpu1")
    for rank in range(2):
        rollout = Rank(target, READER, rank, tensor_parallel(rank, 2), dtype=dtype, network=network)
        report = rollout.pull([source.tcp], 1)
        assert rollout.holds(1)
        assert report.bytes_by_source == {source.tcp: rollout.nbytes}
        assert (report.bytes_moved, report.attempts) == (rollout.nbytes, 1)
        rollout.close()


def test_a_version_migrates_by_tls_each_rank_to_its_own_node(
    start_node: StartDaemon, make_shard: MakeShard, node: Daemon, network: Network
) -> None:
    targets = [start_node(f"gpu{index}") for index in (1, 2)]
    expected = offloaded(node, make_shard, ranks=4, elements=MIB)
    state = len(expected[0])
    moved = 0
    for target, ranks in zip(targets, ((0, 1), (2, 3)), strict=True):
        report = migrate(
            [node.tcp],
            target.config.listen,
            deployment=NAME,
            seq=1,
            ticket=target.ticket(role=TicketRole.AGENT),
            network=network,
            ranks=ranks,
            timeout_s=DEADLINE_S,
        )
        assert report.bytes_moved == 2 * state
        moved += report.bytes_moved
        with contextlib.closing(target.agent()) as agent:
            versions = agent.usage()["deployments"][NAME]["versions"]
        assert sorted(version["rank"] for version in versions) == list(ranks)
    assert moved == 4 * state


def keep_asking(connection: TcpConnection) -> None:
    """Return by the exception that says that the connection has ended."""
    while True:
        connection.ask({"type": "confirm"})


def refusal(node: Daemon, network: Network) -> PlexRLError:
    with pytest.raises(PlexRLError) as raised:
        agent_connection(node, network)
    return raised.value


def answer_to(node: Daemon, files: TlsFiles | None) -> bytes:
    """What the server sends after a handshake of a client that checks nothing itself."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if files is not None:
        context.load_cert_chain(files.certificate, files.key)
    with (
        socket.create_connection(endpoint(node), timeout=TIMEOUT_S) as raw,
        context.wrap_socket(raw) as secure,
    ):
        try:
            return secure.recv(1 << 16)
        except (ssl.SSLError, ConnectionResetError):
            # In TLS 1.3 the refusal arrives after the client's side of the handshake.
            return b""


def test_a_reader_without_a_certificate_is_refused(node: Daemon, network: Network) -> None:
    assert isinstance(refusal(node, NO_NETWORK), InvalidRequestError)
    assert answer_to(node, None) == b""
    check_serves(node, network)


def test_a_node_of_another_cluster_is_refused(
    node: Daemon, network: Network, tmp_path: Path
) -> None:
    stranger = TestAuthority(tmp_path / "stranger").credentials(Role.NODE, "gpu1")
    assert isinstance(refusal(node, Network(stranger)), AuthenticationError)
    check_serves(node, network)


def test_an_expired_certificate_is_refused(
    node: Daemon, network: Network, authority: TestAuthority
) -> None:
    old = authority.files(Role.NODE, "old", life=timedelta(seconds=-1))
    assert isinstance(refusal(node, Network(Credentials(old))), AuthenticationError)
    # The node itself refuses it too.
    assert answer_to(node, old) == b""
    assert answer_to(node, authority.files(Role.NODE, "new")) != b""
    check_serves(node, network)


@pytest.mark.parametrize("role", [Role.ROUTER, Role.SCHEDULER])
def test_a_router_is_refused_with_the_reason(
    node: Daemon, network: Network, authority: TestAuthority, role: Role
) -> None:
    found = refusal(node, Network(authority.credentials(role, "router0")))
    assert isinstance(found, PermissionDeniedError)
    assert "this port is for a node" in found.message
    check_serves(node, network)


def test_a_reader_does_not_take_another_node_for_the_one_it_asked_for(
    node: Daemon, network: Network
) -> None:
    address = node.tcp.replace("gpu0@", "gpu7@")
    with pytest.raises(AuthenticationError, match="gpu7"):
        TcpConnection(network, address, node.ticket(role=TicketRole.AGENT), TIMEOUT_S)


def test_a_certificate_without_a_ticket_of_the_cluster_reads_nothing(
    node: Daemon, network: Network
) -> None:
    forged = TicketKey(b"another" * 8).mint(AGENT)
    with pytest.raises((PlexRLError, OSError)):
        TcpConnection(network, node.tcp, forged, TIMEOUT_S)
    check_serves(node, network)


@pytest.mark.usefixtures("trainers")
def test_a_worker_of_another_job_is_refused(node: Daemon, network: Network) -> None:
    ticket = node.worker_ticket("other/rollout")
    with contextlib.closing(TcpConnection(network, node.tcp, ticket, TIMEOUT_S)) as connection:
        with pytest.raises(PermissionDeniedError, match="deployments of job 'other'"):
            connection.ask({"type": "open", "source": "job/actor", "seq": 1})
        with pytest.raises(PermissionDeniedError, match="of its own deployment"):
            open_states(connection, "job/actor", 1)


def test_an_unencrypted_address_is_refused_unless_the_network_is_declared_trusted(
    start_daemon: StartDaemon, network: Network
) -> None:
    plain = start_daemon(serve_tcp="127.0.0.1:0")
    assert plain.tcp.startswith("tcp://")
    with pytest.raises(InvalidRequestError, match="not encrypted"):
        agent_connection(plain, network)
    check_serves(plain, NETWORK)


def test_plain_tcp_does_not_get_into_a_port_of_tls(node: Daemon, network: Network) -> None:
    address = node.tcp.replace("tls://gpu0@", "tcp://")
    with pytest.raises((PlexRLError, OSError)):
        TcpConnection(NETWORK, address, node.ticket(role=TicketRole.AGENT), TIMEOUT_S)
    check_serves(node, network)


def test_serving_other_nodes_needs_a_certificate_or_trust(node: Daemon) -> None:
    with pytest.raises(InvalidRequestError, match="serve_tcp needs tls"):
        replace(node.config, tls=None)
    with pytest.raises(InvalidRequestError, match='fabric is "trusted" or empty'):
        replace(node.config, fabric="yes")


def test_a_renewed_certificate_is_used_without_a_restart(
    node: Daemon, network: Network, tmp_path: Path
) -> None:
    """The cluster's authority is replaced; old certificates are no longer accepted."""
    new = TestAuthority(tmp_path / "renewed")
    files = new.files(Role.NODE, "gpu0")
    assert node.config.tls is not None
    for name in ("ca", "certificate", "key"):
        Path(getattr(node.config.tls, name)).write_bytes(Path(getattr(files, name)).read_bytes())
    check_serves(node, Network(new.credentials(Role.NODE, "gpu1")))
    assert isinstance(refusal(node, network), AuthenticationError)


def test_half_open_handshakes_take_no_places_of_other_nodes(
    start_node: StartDaemon, network: Network
) -> None:
    node = start_node(connections_max=2)
    with half_open(TlsAddress(*endpoint(node)), BLOCKING_HANDSHAKES_MAX + 50) as flood:
        assert all(is_ended(raw) for raw in flood[:50]), "the oldest are replaced"
        check_serves(node, network)


def test_a_revoked_node_is_refused_and_its_open_connections_end(
    node: Daemon, network: Network, authority: TestAuthority
) -> None:
    stolen = authority.files(Role.NODE, "stolen")
    thief = Network(Credentials(replace(stolen, crl="")))
    with contextlib.closing(agent_connection(node, thief)) as connection:
        assert connection.ask({"type": "confirm"}) == {}
        authority.revoke(stolen)
        with pytest.raises(AuthenticationError, match="revoked"):
            agent_connection(node, thief)
        with pytest.raises((PlexRLError, OSError)):
            keep_asking(connection)
    check_serves(node, network)


Send = Callable[[random.Random], bytes]

FUZZ: dict[str, Send] = {
    "noise": lambda chance: chance.randbytes(chance.randrange(1, 4096)),
    "a huge announced header": lambda _: b"\xff" * 12,
    "a huge announced payload": lambda _: encode_head({"type": "confirm"}, 1 << 33),
    "a header that is no map": lambda _: b"\x01\0\0\0" + bytes(8) + b"\x07",
    "a request that does not exist": lambda _: encode_head({"type": "remove"}, 0),
    "a cut frame": lambda _: encode_head({"type": "confirm"}, 100) + bytes(50),
    "odd copies": lambda chance: (
        encode_head({"type": "read", "shard": chance.randrange(-9, 9), "stamp": "x"}, 333)
        + chance.randbytes(333)
    ),
}


@pytest.mark.parametrize("kind", FUZZ)
@pytest.mark.usefixtures("trainers")
def test_bad_frames_end_their_connection_and_nothing_else(
    node: Daemon, network: Network, kind: str
) -> None:
    chance = random.Random(7)
    with contextlib.closing(agent_connection(node, network)) as witness:
        witness.ask({"type": "open", "source": "job/actor", "seq": 1})
        for _ in range(10):
            secure = network.connect(node.tcp, TIMEOUT_S)
            greet_server(secure, node.worker_ticket(READER))
            with contextlib.suppress(OSError):
                secure.sendall(FUZZ[kind](chance))
                secure.shutdown(socket.SHUT_WR)
                while secure.recv(1 << 16):
                    # At most it is told what is wrong.
                    pass
            secure.close()
        # Another reader's versions are still held.
        assert witness.ask({"type": "confirm"}) == {}
    check_serves(node, network)
    assert node.is_alive()


def test_noise_instead_of_a_handshake_ends_its_connection_only(
    node: Daemon, network: Network
) -> None:
    chance = random.Random(7)
    for _ in range(20):
        with (
            socket.create_connection(endpoint(node), timeout=TIMEOUT_S) as raw,
            contextlib.suppress(OSError),
        ):
            raw.sendall(chance.randbytes(chance.randrange(1, 2048)))
            raw.shutdown(socket.SHUT_WR)
            while raw.recv(1 << 16):
                pass
    check_serves(node, network)


def test_a_source_that_is_gone_is_reported_with_its_address(
    start_node: StartDaemon, node: Daemon, network: Network
) -> None:
    target = start_node("gpu1")
    rollout = Rank(target, READER, 0, fsdp(0, 1), timeout_s=1.0, network=network)
    node.kill()
    with pytest.raises(UnavailableError, match=r"tls://gpu0@127\.0\.0\.1"):
        rollout.pull([node.tcp], 1)
    rollout.close()
