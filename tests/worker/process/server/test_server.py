"""A worker's socket outlives whatever is sent to it."""

import random
import socket
import ssl
import struct
import threading
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from plexrl.errors import AuthenticationError, ConnectionLostError, PermissionDeniedError
from plexrl.wire.framing import recv_frame, send_frame
from plexrl.wire.links.address import Address, TlsAddress, UnixAddress
from plexrl.wire.links.credentials import Credentials, Role
from plexrl.wire.links.dial import BLOCKING_HANDSHAKES_MAX, connect_blocking
from plexrl.wire.messages import WorkerName
from plexrl.worker.process.server.server import WorkerServer
from tests.certificates import TestAuthority
from tests.half_open import half_open, is_ended

LENGTHS = struct.Struct("<IQ")
WORKER = WorkerName("job/actor", 1, 7)
RUN = {"request": "run", "worker": list(WORKER)}


@pytest.mark.parametrize(
    "hostile",
    [
        LENGTHS.pack(2**32 - 1, 0),
        LENGTHS.pack(5, 0) + b"\x81\xa1a\xa1\xff",
        LENGTHS.pack(50_004, 0) + b"\x81\xa1a" + b"\x91" * 50_000 + b"\xc0",
        LENGTHS.pack(1, 0) + b"\xc0",
    ],
    ids=["too-long", "bad-text", "deep", "no-map"],
)
@pytest.mark.parametrize("is_far", [False, True], ids=["unix", "tls"])
def test_a_malformed_frame_ends_its_own_connection_only(
    tmp_path: Path, hostile: bytes, is_far: bool
) -> None:
    address: Address = UnixAddress(str(tmp_path / "w.sock"))
    node = router = None
    if is_far:
        authority = TestAuthority(tmp_path)
        address = TlsAddress("127.0.0.1", 0, "n1")
        node, router = authority.credentials(Role.NODE, "n1"), authority.credentials(Role.ROUTER)
    server = WorkerServer(address, WORKER, node)
    bad, good = (
        connect_blocking(server.address, router, role=Role.NODE, timeout_s=20.0)[0] for _ in "12"
    )
    bad.sendall(hostile)
    assert bad.recv(1) == b""
    send_frame(good, RUN, b"payload")
    request = server.requests.get(timeout=60.0)
    assert (request.header, bytes(request.payload)) == (RUN, b"payload")
    for sock in (bad, good):
        sock.close()


def test_a_connection_without_a_thread_is_refused_and_the_next_one_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = TestAuthority(tmp_path)
    server = WorkerServer(
        TlsAddress("127.0.0.1", 0, "n1"), WORKER, authority.credentials(Role.NODE, "n1")
    )
    router = authority.credentials(Role.ROUTER)
    assert isinstance(server.address, TlsAddress)
    where = server.address.host, server.address.port
    begin = threading.Thread.start

    def no_more_threads(_: threading.Thread) -> None:
        monkeypatch.setattr(threading.Thread, "start", begin)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_more_threads)
    with socket.create_connection(where, timeout=20.0) as refused:
        assert refused.recv(1) == b""
    good, _ = connect_blocking(server.address, router, role=Role.NODE, timeout_s=20.0)
    send_frame(good, RUN, b"payload")
    assert server.requests.get(timeout=60.0).header == RUN
    good.close()


@pytest.mark.parametrize(
    "worker",
    [["job/critic", 1, 7], ["job/actor", 0, 7], ["job/actor", 1, 6], ["job/actor", 1, 8], None, 5],
)
def test_a_request_for_another_worker_is_refused_and_not_run(
    tmp_path: Path, worker: object
) -> None:
    address = str(tmp_path / "w.sock")
    server = WorkerServer(UnixAddress(address), WORKER)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(20.0)
        sock.connect(address)
        send_frame(sock, {"request": "run", "worker": worker})
        reply, _ = recv_frame(sock)
        assert (reply["reply"], reply["error"]["code"]) == ("refused", "wrong_worker")
        assert sock.recv(1) == b""
    assert server.requests.empty()


def test_a_payload_that_comes_before_its_run_waits_for_it(tmp_path: Path) -> None:
    address = UnixAddress(str(tmp_path / "w.sock"))
    server = WorkerServer(address, WORKER)
    sock, _ = connect_blocking(address, None, role=Role.NODE, timeout_s=20.0)
    stage = {**RUN, "request": "stage", "payload": "p"}
    send_frame(sock, stage, b"staged")
    send_frame(sock, {**RUN, "request": "optim_step"})
    assert server.requests.get(timeout=60.0).header["request"] == "optim_step"
    send_frame(sock, {**RUN, "staged": "p"})
    assert bytes(server.requests.get(timeout=60.0).payload) == b"staged"
    for discard in ({**stage, "payload": ""}, RUN):
        send_frame(sock, stage, b"staged")
        send_frame(sock, discard, b"" if discard != RUN else b"own")
    assert bytes(server.requests.get(timeout=60.0).payload) == b"own"
    send_frame(sock, {**RUN, "staged": "p"})
    assert sock.recv(1) == b"", "the payload was discarded, and the router sends the run again"
    assert server.requests.empty()
    sock.close()


def test_over_tls_a_router_is_served_while_another_client_never_greets(tmp_path: Path) -> None:
    authority = TestAuthority(tmp_path)
    listening = TlsAddress("127.0.0.1", 0, "n1")
    server = WorkerServer(listening, WORKER, authority.credentials(Role.NODE, "n1"))
    assert isinstance(server.address, TlsAddress)
    silent = socket.create_connection((server.address.host, server.address.port))
    router = authority.credentials(Role.ROUTER, "r")
    with silent:
        sock, peer = connect_blocking(server.address, router, role=Role.NODE)
        assert peer.name == "n1"
        sent = threading.Thread(target=send_frame, args=(sock, RUN, bytes(8 << 20)))
        sent.start()
        request = server.requests.get(timeout=60.0)
        sent.join()
        assert len(request.payload) == 8 << 20
        request.connection.send({"reply": "finished"}, b"x" * (3 << 20))
        header, payload = recv_frame(sock)
        assert (header, len(payload)) == ({"reply": "finished"}, 3 << 20)
        sock.close()


@pytest.mark.parametrize("kind", ["none", "foreign", "expired"])
def test_over_tls_a_worker_refuses_clients_without_a_valid_certificate(
    tmp_path: Path, kind: str
) -> None:
    authority = TestAuthority(tmp_path / "ours")
    server = WorkerServer(
        TlsAddress("127.0.0.1", 0), WORKER, authority.credentials(Role.NODE, "n1")
    )
    assert isinstance(server.address, TlsAddress)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if kind != "none":
        issuer = authority if kind == "expired" else TestAuthority(tmp_path / "theirs")
        life = timedelta(seconds=-1) if kind == "expired" else timedelta(days=1)
        files = issuer.files(Role.ROUTER, "r", life=life)
        context.load_cert_chain(files.certificate, files.key)
    with (
        socket.create_connection((server.address.host, server.address.port)) as raw,
        suppress(ssl.SSLError, ConnectionResetError),
        context.wrap_socket(raw) as secure,
    ):
        # In TLS 1.3 the refusal arrives after the client's side of the handshake.
        send_frame(secure, RUN)
        assert secure.recv(1) == b""
    served, _ = connect_blocking(
        server.address, authority.credentials(Role.ROUTER, "r"), role=Role.NODE
    )
    send_frame(served, RUN)
    assert server.requests.get(timeout=60.0).header == RUN
    served.close()
    assert server.requests.empty(), "the refused client's request was taken"


def test_over_tls_noise_ends_its_connection_and_nothing_else(tmp_path: Path) -> None:
    """Before the handshake, and in place of frames after it."""
    authority, chance = TestAuthority(tmp_path), random.Random(5)
    server = WorkerServer(
        TlsAddress("127.0.0.1", 0), WORKER, authority.credentials(Role.NODE, "n1")
    )
    assert isinstance(server.address, TlsAddress)
    router = authority.credentials(Role.ROUTER, "r")
    witness, _ = connect_blocking(server.address, router, role=Role.NODE)
    for _ in range(20):
        with socket.create_connection((server.address.host, server.address.port)) as raw:
            raw.sendall(b"\xff" + chance.randbytes(chance.randrange(1, 2000)))
            assert is_ended(raw)
        secure, _ = connect_blocking(server.address, router, role=Role.NODE)
        with suppress(OSError):
            secure.sendall(b"\xff" * 12 + chance.randbytes(chance.randrange(1, 2000)))
            assert secure.recv(1 << 16) == b""
        secure.close()
    assert server.requests.empty()
    send_frame(witness, RUN)
    assert server.requests.get(timeout=60.0).header == RUN
    witness.close()


def test_half_open_handshakes_do_not_keep_a_router_out(tmp_path: Path) -> None:
    authority = TestAuthority(tmp_path)
    server = WorkerServer(
        TlsAddress("127.0.0.1", 0), WORKER, authority.credentials(Role.NODE, "n1")
    )
    assert isinstance(server.address, TlsAddress)
    with half_open(server.address, BLOCKING_HANDSHAKES_MAX + 50) as flood:
        assert all(is_ended(raw) for raw in flood[:50]), "the oldest are replaced"
        sock, _ = connect_blocking(
            server.address, authority.credentials(Role.ROUTER, "r"), role=Role.NODE
        )
        send_frame(sock, RUN)
        assert server.requests.get(timeout=60.0).header == RUN
        sock.close()


def test_over_tls_a_worker_refuses_a_revoked_router(tmp_path: Path) -> None:
    authority = TestAuthority(tmp_path)
    server = WorkerServer(
        TlsAddress("127.0.0.1", 0), WORKER, authority.credentials(Role.NODE, "n1")
    )
    stolen = authority.files(Role.ROUTER, "stolen")
    thief = Credentials(replace(stolen, crl=""))
    sock, _ = connect_blocking(server.address, thief, role=Role.NODE)
    authority.revoke(stolen)
    with pytest.raises(AuthenticationError, match="revoked"):
        connect_blocking(server.address, thief, role=Role.NODE)
    with pytest.raises(ConnectionLostError):
        recv_frame(sock)
    sock.close()
    again, _ = connect_blocking(
        server.address, authority.credentials(Role.ROUTER, "r"), role=Role.NODE
    )
    again.close()


@pytest.mark.parametrize(("role", "name"), [(Role.NODE, "n1"), (Role.SCHEDULER, "s")])
def test_over_tls_a_worker_refuses_all_but_routers(tmp_path: Path, role: Role, name: str) -> None:
    authority = TestAuthority(tmp_path)
    listening = TlsAddress("127.0.0.1", 0, "n1")
    server = WorkerServer(listening, WORKER, authority.credentials(Role.NODE, "n1"))
    with pytest.raises(PermissionDeniedError):
        connect_blocking(server.address, authority.credentials(role, name), role=Role.NODE)
