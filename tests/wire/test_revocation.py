"""Revoked certificates: refused at both ends of every kind of link, and their open links end."""

import asyncio
import shutil
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from plexrl.errors import AuthenticationError, ConnectionLostError, InvalidRequestError
from plexrl.wire.framing import read_frame, recv_frame, send_frame, write_frame
from plexrl.wire.links.address import TlsAddress
from plexrl.wire.links.credentials import Credentials, Role
from plexrl.wire.links.dial import Link, connect, connect_blocking, listen_blocking, serve
from plexrl.wire.links.frame_socket import FrameSocket
from tests.certificates import TestAuthority

ANY_PORT = TlsAddress("127.0.0.1", 0)


@pytest.fixture
def ours(tmp_path: Path) -> TestAuthority:
    return TestAuthority(tmp_path / "ours")


@asynccontextmanager
async def _echo(credentials: Credentials) -> AsyncIterator[TlsAddress]:
    """A server that sends frames back until the end of each link."""
    serving: list[asyncio.Task[None] | None] = []

    async def answer(link: Link) -> None:
        serving.append(asyncio.current_task())
        with suppress(ConnectionLostError):
            while True:
                await write_frame(link.writer, (await read_frame(link.reader))[0])
        link.writer.close()

    server = await serve(ANY_PORT, credentials, answer, roles={Role.NODE})
    assert isinstance(server.address, TlsAddress)
    yield server.address
    server.close()
    await asyncio.gather(*(each for each in serving if each is not None))


@contextmanager
def _blocking_echo(credentials: Credentials) -> Iterator[TlsAddress]:
    """As `_echo`, with a thread for each link."""
    listener = listen_blocking(ANY_PORT, credentials, roles={Role.NODE})

    def answer(accepted: socket.socket) -> None:
        try:
            sock, _ = listener.greet(accepted)
            with closing(sock):
                while True:
                    send_frame(sock, recv_frame(sock)[0])
        except (AuthenticationError, ConnectionLostError):
            return

    def accept() -> None:
        while True:
            try:
                accepted = listener.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(accepted,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    assert isinstance(listener.address, TlsAddress)
    with closing(listener):
        yield listener.address


async def _is_served(link: Link) -> bool:
    await write_frame(link.writer, {"said": "hello"})
    return (await read_frame(link.reader))[0] == {"said": "hello"}


def test_a_server_ends_and_refuses_the_links_of_a_revoked_client(ours: TestAuthority) -> None:
    stolen = ours.files(Role.NODE, "stolen")
    # A thief's process follows no list.
    thief, honest = Credentials(replace(stolen, crl="")), ours.credentials(Role.NODE, "honest")

    async def run() -> None:
        async with _echo(ours.credentials(Role.SCHEDULER)) as address:
            link = await connect(address, thief, role=Role.SCHEDULER)
            other = await connect(address, honest, role=Role.SCHEDULER)
            assert await _is_served(link)

            ours.revoke(stolen)

            with pytest.raises(AuthenticationError, match=r"node 'stolen' is revoked.*node token"):
                await connect(address, thief, role=Role.SCHEDULER)
            assert await link.reader.read() == b"", "the open link ends"
            assert await _is_served(other)
            link.writer.close()
            other.writer.close()

    asyncio.run(run())


def test_a_blocking_server_ends_and_refuses_the_links_of_a_revoked_client(
    ours: TestAuthority,
) -> None:
    stolen = ours.files(Role.NODE, "stolen")
    thief = Credentials(replace(stolen, crl=""))
    honest = ours.credentials(Role.NODE, "honest")
    with _blocking_echo(ours.credentials(Role.SCHEDULER)) as address:
        open_link, _ = connect_blocking(address, thief, role=Role.SCHEDULER)
        other, _ = connect_blocking(address, honest, role=Role.SCHEDULER)

        ours.revoke(stolen)

        with pytest.raises(AuthenticationError, match="revoked"):
            connect_blocking(address, thief, role=Role.SCHEDULER)
        with pytest.raises(ConnectionLostError):
            recv_frame(open_link)
        send_frame(other, {"said": "hello"})
        assert recv_frame(other)[0] == {"said": "hello"}
        for link in (open_link, other):
            link.close()


def test_a_client_refuses_and_leaves_a_revoked_server(ours: TestAuthority) -> None:
    files = ours.files(Role.SCHEDULER)
    client = ours.credentials(Role.NODE, "a")

    async def run() -> None:
        async with _echo(Credentials(replace(files, crl=""))) as address:
            link = await connect(address, client, role=Role.SCHEDULER)
            frames = await FrameSocket.connect(address, client, role=Role.SCHEDULER)
            await frames.send({})
            assert (await frames.receive())[0] == {}

            ours.revoke(files)

            refused = pytest.raises(AuthenticationError, match="scheduler is revoked")
            with refused:
                await connect(address, client, role=Role.SCHEDULER)
            with refused:
                await FrameSocket.connect(address, client, role=Role.SCHEDULER)
            with refused:
                await asyncio.to_thread(connect_blocking, address, client, role=Role.SCHEDULER)
            assert await link.reader.read() == b""
            with pytest.raises(ConnectionLostError):
                await frames.receive()
            frames.close()
            link.writer.close()

    asyncio.run(run())


def test_a_list_is_taken_only_from_a_trusted_authority_and_only_if_it_is_newer(
    ours: TestAuthority, tmp_path: Path
) -> None:
    files = ours.files(Role.NODE, "a")
    former, newer = ours.revoked(), ours.revoked(files)
    known = Credentials(replace(files, crl=str(tmp_path / "own.pem")))
    assert (known.revoked.number, known.revoked.serials) == (0, frozenset())

    known.learn(newer)
    assert len(known.revoked.serials) == 1
    known.learn(former)
    assert len(known.revoked.serials) == 1
    # It is stored for other processes, and for the next start.
    assert Credentials(replace(files, crl=str(tmp_path / "own.pem"))).revoked == known.revoked

    theirs = TestAuthority(tmp_path / "theirs").revoked(files)
    with pytest.raises(InvalidRequestError, match="signed by none of the authorities"):
        known.learn(theirs)
    with pytest.raises(InvalidRequestError, match="no numbered list"):
        known.learn("-----BEGIN X509 CRL-----\nnonsense")


def test_an_unusable_list_is_refused_at_the_start_and_leaves_the_former_in_use_later(
    ours: TestAuthority, tmp_path: Path
) -> None:
    files = ours.files(Role.NODE, "a")
    ours.revoke(files)
    known = Credentials(files)
    TestAuthority(tmp_path / "theirs").revoke()
    shutil.copy(tmp_path / "theirs" / "crl.pem", files.crl)

    assert len(known.revoked.serials) == 1
    with pytest.raises(InvalidRequestError, match="signed by none of the authorities"):
        Credentials(files)
