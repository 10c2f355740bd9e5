"""Addresses, and authenticated links over real sockets, with asyncio and with threads."""

import asyncio
import os
import shutil
import socket
import ssl
import threading
from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plexrl.errors import AuthenticationError, InvalidRequestError, PermissionDeniedError
from plexrl.wire.framing import read_frame, recv_frame, send_frame, write_frame
from plexrl.wire.links.address import TlsAddress, UnixAddress, parse_address
from plexrl.wire.links.credentials import LOCAL, Credentials, Identity, Role, identity_of
from plexrl.wire.links.dial import Link, connect, connect_blocking, listen_blocking, serve
from plexrl.wire.links.tls_socket import TlsSocket
from tests.certificates import TestAuthority
from tests.examples import examples

ANY_PORT = TlsAddress("127.0.0.1", 0)
EXPIRED = timedelta(seconds=-1)
WAIT_S = 60.0


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> TestAuthority:
    return TestAuthority(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> TestAuthority:
    return TestAuthority(tmp_path_factory.mktemp("foreign"))


HOSTS = st.one_of(
    st.from_regex(r"[a-z0-9]([a-z0-9.-]{0,20}[a-z0-9])?", fullmatch=True),
    st.ip_addresses(v=4).map(str),
    st.ip_addresses(v=6).map(str),
)


@given(HOSTS, st.integers(0, 65535), st.text(st.characters(codec="utf-8"), max_size=20))
def test_every_tls_address_survives_being_written_and_read(host: str, port: int, node: str) -> None:
    address = TlsAddress(host, port, node)

    assert parse_address(str(address)) == address


def test_a_unix_address_survives_being_written_and_read() -> None:
    assert parse_address("unix:/run/a b/s.sock") == UnixAddress("/run/a b/s.sock")
    assert str(UnixAddress("/run/s.sock")) == "unix:/run/s.sock"


@pytest.mark.parametrize(
    "text",
    [
        *("", "/run/s.sock", "unix:relative", "unix:/" + "x" * 107, "tcp://127.0.0.1:80"),
        *("tls://host", "tls://:80", "tls://host:99999", "tls://host:80/path", "tls://u:p@h:80"),
        *("tls://host:80?x=1", "http://host:80", "tls://[::1:80"),
    ],
)
def test_other_texts_are_no_addresses(text: str) -> None:
    with pytest.raises(InvalidRequestError):
        parse_address(text)


def test_an_identity_is_read_from_the_certificate(ours: TestAuthority) -> None:
    assert ours.credentials(Role.NODE, "gpu 3/a").identity == Identity(Role.NODE, "gpu 3/a")


@pytest.mark.parametrize(
    "uris",
    [
        *([], ["plexrl://node/a", "plexrl://router/b"], ["plexrl://local/"], ["plexrl://king/a"]),
        ["spiffe://other/node/a"],
    ],
)
def test_a_certificate_without_one_name_of_a_process_has_no_identity(uris: list[str]) -> None:
    with pytest.raises(AuthenticationError):
        identity_of({"subjectAltName": [("URI", uri) for uri in uris]})


def test_files_that_do_not_belong_together_are_refused(ours: TestAuthority) -> None:
    files = ours.files(Role.NODE, "a")
    other = ours.files(Role.NODE, "b")

    with pytest.raises(InvalidRequestError, match="cannot be used for TLS"):
        Credentials(type(files)(ca=files.ca, certificate=files.certificate, key=other.key))


async def _echo(link: Link) -> None:
    header, payload = await read_frame(link.reader)
    await write_frame(link.writer, {**header, "peer": str(link.peer)}, payload)
    link.writer.close()


async def _said_back(link: Link) -> dict[str, Any]:
    try:
        await write_frame(link.writer, {"said": "hello"}, b"x" * 100_000)
        header, payload = await read_frame(link.reader)
        assert payload == b"x" * 100_000
        return header
    finally:
        link.writer.close()


def test_both_ends_of_a_link_know_each_other(ours: TestAuthority) -> None:
    async def run() -> None:
        scheduler, node = ours.credentials(Role.SCHEDULER), ours.credentials(Role.NODE, "a")
        server = await serve(ANY_PORT, scheduler, _echo, roles={Role.NODE})
        link = await connect(server.address, node, role=Role.SCHEDULER)

        assert link.peer == Identity(Role.SCHEDULER)
        assert await _said_back(link) == {"said": "hello", "peer": "node 'a'"}
        server.close()

    asyncio.run(run())


def test_a_unix_link_needs_no_certificate(tmp_path: Path) -> None:
    address = UnixAddress(str(tmp_path / "s"))

    async def run() -> None:
        server = await serve(address, None, _echo, roles=())
        link = await connect(address, None, role=Role.SCHEDULER)

        assert link.peer == LOCAL
        assert await _said_back(link) == {"said": "hello", "peer": "local"}
        server.close()

    asyncio.run(run())
    assert not Path(address.path).exists()


@contextmanager
def _blocking_echo(
    credentials: Credentials, roles: Collection[Role]
) -> Iterator[tuple[TlsAddress, Queue[Exception]]]:
    """A server with a thread per connection; yields its address and the refusals."""
    listener = listen_blocking(ANY_PORT, credentials, roles=roles)
    refused: Queue[Exception] = Queue()

    def answer(accepted: socket.socket) -> None:
        try:
            sock, peer = listener.greet(accepted)
            with closing(sock):
                header, payload = recv_frame(sock)
                send_frame(sock, {**header, "peer": str(peer)}, payload)
        except Exception as error:
            refused.put(error)

    def accept() -> None:
        while True:
            try:
                accepted = listener.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(accepted,), daemon=True).start()

    accepting = threading.Thread(target=accept, daemon=True)
    accepting.start()
    assert isinstance(listener.address, TlsAddress)
    try:
        yield listener.address, refused
    finally:
        listener.close()
        accepting.join()


def test_blocking_links_know_both_ends_too(ours: TestAuthority) -> None:
    with _blocking_echo(ours.credentials(Role.NODE, "a"), {Role.ROUTER}) as (address, _):
        named = TlsAddress(address.host, address.port, "a")
        sock, peer = connect_blocking(named, ours.credentials(Role.ROUTER, "r0"), role=Role.NODE)
        with closing(sock):
            send_frame(sock, {"said": "hello"}, b"y" * 3_000_000)
            header, payload = recv_frame(sock)

    assert peer == Identity(Role.NODE, "a")
    assert header == {"said": "hello", "peer": "router 'r0'"}
    assert payload == b"y" * 3_000_000


Refusal = tuple[type[Exception], Credentials | None]


def _refused_clients(ours: TestAuthority, foreign: TestAuthority) -> dict[str, Refusal]:
    return {
        "another cluster's": (AuthenticationError, foreign.credentials(Role.NODE, "a")),
        "expired": (AuthenticationError, ours.credentials(Role.NODE, "late", life=EXPIRED)),
        "another role": (PermissionDeniedError, ours.credentials(Role.ROUTER, "r0")),
        "none": (InvalidRequestError, None),
    }


@pytest.mark.parametrize("kind", ["another cluster's", "expired", "another role", "none"])
def test_a_server_refuses_clients_that_may_not_connect(
    ours: TestAuthority, foreign: TestAuthority, kind: str
) -> None:
    error, credentials = _refused_clients(ours, foreign)[kind]

    async def run() -> None:
        scheduler = ours.credentials(Role.SCHEDULER)
        server = await serve(ANY_PORT, scheduler, _echo, roles={Role.NODE})
        with pytest.raises(error):
            await connect(server.address, credentials, role=Role.SCHEDULER)
        good = await connect(server.address, ours.credentials(Role.NODE, "a"), role=Role.SCHEDULER)
        assert (await _said_back(good))["said"] == "hello"
        server.close()

    asyncio.run(run())
    with _blocking_echo(ours.credentials(Role.SCHEDULER), {Role.NODE}) as (address, _):
        with pytest.raises(error):
            connect_blocking(address, credentials, role=Role.SCHEDULER)
        sock, _ = connect_blocking(address, ours.credentials(Role.NODE, "a"), role=Role.SCHEDULER)
        sock.close()


def test_a_client_without_a_certificate_is_refused_whatever_it_sends(ours: TestAuthority) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        _blocking_echo(ours.credentials(Role.SCHEDULER), {Role.NODE}) as (address, refused),
        socket.create_connection((address.host, address.port)) as raw,
    ):
        secure = context.wrap_socket(raw)
        with pytest.raises(ssl.SSLError):
            secure.recv(1)
        secure.close()

    assert isinstance(refused.get(timeout=WAIT_S), AuthenticationError)


@pytest.mark.parametrize("kind", ["role", "node", "cluster", "expired"])
def test_a_client_refuses_servers_that_are_not_whom_it_wants(
    ours: TestAuthority, foreign: TestAuthority, kind: str
) -> None:
    server = {
        "role": ours.credentials(Role.ROUTER, "a"),
        "node": ours.credentials(Role.NODE, "b"),
        "cluster": foreign.credentials(Role.NODE, "a"),
        "expired": ours.credentials(Role.NODE, "a", life=EXPIRED),
    }[kind]
    client = ours.credentials(Role.ROUTER, "r0")
    with _blocking_echo(server, {Role.ROUTER}) as (address, _):
        named = TlsAddress(address.host, address.port, "a")
        with pytest.raises(AuthenticationError):
            connect_blocking(named, client, role=Role.NODE)
        with pytest.raises(AuthenticationError):
            asyncio.run(connect(named, client, role=Role.NODE))


def test_an_address_where_nobody_listens_is_an_os_error(ours: TestAuthority) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = TlsAddress("127.0.0.1", probe.getsockname()[1])
    node = ours.credentials(Role.NODE, "a")

    with pytest.raises(OSError, match=r"refused|Connect call failed"):
        connect_blocking(address, node, role=Role.SCHEDULER)
    with pytest.raises(OSError, match=r"refused|Connect call failed"):
        asyncio.run(connect(address, node, role=Role.SCHEDULER))


def _connect(address: TlsAddress, credentials: Credentials, *, blocking: bool) -> None:
    if blocking:
        connect_blocking(address, credentials, role=Role.SCHEDULER, timeout_s=0.1)
    else:
        asyncio.run(connect(address, credentials, role=Role.SCHEDULER, timeout_s=0.1))


@pytest.mark.parametrize("blocking", [True, False])
def test_a_server_that_does_not_answer_is_a_timeout(ours: TestAuthority, blocking: bool) -> None:
    node = ours.credentials(Role.NODE, "a")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = TlsAddress("127.0.0.1", silent.getsockname()[1])
        with pytest.raises(TimeoutError):
            _connect(address, node, blocking=blocking)


def _replace(files: Any, new: Any) -> None:
    for name in ("ca", "certificate", "key"):
        part = Path(getattr(files, name) + ".new")
        shutil.copy(getattr(new, name), part)
        part.replace(getattr(files, name))


def test_a_running_server_takes_replaced_files_and_drops_the_old_authority(
    ours: TestAuthority, foreign: TestAuthority, tmp_path: Path
) -> None:
    old_client, new_client = (one.credentials(Role.NODE, "a") for one in (ours, foreign))
    files = TestAuthority(tmp_path).files(Role.SCHEDULER)
    _replace(files, ours.files(Role.SCHEDULER))
    credentials = Credentials(files)

    async def run() -> None:
        server = await serve(ANY_PORT, credentials, _echo, roles={Role.NODE})
        before = await connect(server.address, old_client, role=Role.SCHEDULER)
        _replace(files, foreign.files(Role.SCHEDULER))

        with pytest.raises(AuthenticationError):
            await connect(server.address, old_client, role=Role.SCHEDULER)
        after = await connect(server.address, new_client, role=Role.SCHEDULER)
        # An open link goes on.
        for link in (before, after):
            assert (await _said_back(link))["said"] == "hello"
        server.close()

    asyncio.run(run())


def test_a_half_replaced_set_of_files_leaves_the_former_in_use(
    ours: TestAuthority, tmp_path: Path
) -> None:
    files = TestAuthority(tmp_path).files(Role.SCHEDULER)
    _replace(files, ours.files(Role.SCHEDULER))
    credentials = Credentials(files)
    Path(files.key).unlink()

    with _blocking_echo(credentials, {Role.NODE}) as (address, _):
        sock, peer = connect_blocking(
            address, ours.credentials(Role.NODE, "a"), role=Role.SCHEDULER
        )
        sock.close()

    assert peer == Identity(Role.SCHEDULER)


@settings(deadline=None, max_examples=examples(40))
@given(noise=st.binary(min_size=1, max_size=200))
def test_bytes_that_are_no_handshake_end_their_connection_only(
    ours: TestAuthority, noise: bytes
) -> None:
    with _blocking_echo(ours.credentials(Role.SCHEDULER), {Role.NODE}) as (address, refused):
        with socket.create_connection((address.host, address.port)) as raw:
            raw.sendall(noise)
            with suppress(OSError):
                raw.shutdown(socket.SHUT_WR)
                while raw.recv(4096):
                    pass
        sock, _ = connect_blocking(address, ours.credentials(Role.NODE, "a"), role=Role.SCHEDULER)
        sock.close()

    assert isinstance(refused.get(timeout=WAIT_S), AuthenticationError | OSError)


def test_a_tls_socket_that_another_thread_closes_raises_an_os_error(ours: TestAuthority) -> None:
    class ClosedMeanwhile(socket.socket):
        """Is closed between its answer that there is nothing and the wait for something."""

        def recv_into(self, *_: Any) -> int:
            self.close()
            raise BlockingIOError

    near, far = socket.socketpair()
    context = ours.credentials(Role.ROUTER, "r").client_context()
    with far, pytest.raises(OSError, match="Bad file descriptor"):
        TlsSocket(ClosedMeanwhile(fileno=near.detach()), context)


def test_a_tls_socket_sends_while_another_thread_reads(ours: TestAuthority) -> None:
    listener = listen_blocking(ANY_PORT, ours.credentials(Role.NODE, "a"), roles={Role.ROUTER})
    sent = os.urandom(8 << 20)
    server_got: list[bytes] = []

    def serve_one() -> None:
        sock, _ = listener.greet(listener.accept())
        reading = threading.Thread(target=lambda: server_got.append(bytes(recv_frame(sock)[1])))
        reading.start()
        send_frame(sock, {}, sent)
        reading.join()
        sock.close()

    serving = threading.Thread(target=serve_one)
    serving.start()
    sock, _ = connect_blocking(listener.address, ours.credentials(Role.ROUTER, "r"), role=Role.NODE)
    assert isinstance(sock, TlsSocket)
    sending = threading.Thread(target=send_frame, args=(sock, {}, sent))
    sending.start()
    _, got = recv_frame(sock)
    sending.join()
    serving.join()
    sock.close()
    listener.close()

    assert got == sent
    assert server_got == [sent]
