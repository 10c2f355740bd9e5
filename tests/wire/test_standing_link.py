"""The connection to the leading scheduler: several addresses, silence, refusals."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from plexrl.errors import InvalidRequestError, PermissionDeniedError
from plexrl.ids import RouterId
from plexrl.wire.links.address import TlsAddress
from plexrl.wire.links.credentials import Role, TlsFiles
from plexrl.wire.links.dial import Link, Server, serve
from plexrl.wire.links.standing_link import StandingLink, check_scheduler
from plexrl.wire.messages.reports import RouterJoined
from plexrl.wire.rpc import Peer
from tests.certificates import TestAuthority

Plain = dict[str, Any]
DEADLINE_S = 60.0


class FakeScheduler:
    """A scheduler's end: what it answers to `hello`, and whether it answers heartbeats."""

    def __init__(self, answer: Plain | Exception) -> None:
        self.answer = answer
        self.hellos = 0
        self.beats = asyncio.Semaphore(0)
        self.is_silent = False

    async def on_link(self, link: Link) -> None:
        await Peer(link.reader, link.writer, {"hello": self._hello, "beat": self._beat}).run()

    async def _hello(self, _: Peer, __: Plain) -> Plain:
        self.hellos += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    async def _beat(self, _: Peer, __: Plain) -> Plain:
        self.beats.release()
        if self.is_silent:
            await asyncio.Event().wait()
        return {}


class Client:
    """The other end, with the connections that it has had."""

    def __init__(self, addresses: list[str], ours: TestAuthority) -> None:
        self.begun: asyncio.Queue[Peer] = asyncio.Queue()
        self.ended = asyncio.Semaphore(0)
        credentials = ours.credentials(Role.ROUTER, "r")
        self.link = StandingLink(
            addresses,
            credentials,
            {},
            hello=self._hello,
            session=self._session,
            on_end=self.ended.release,
        )

    async def _hello(self) -> RouterJoined:
        return RouterJoined(router=RouterId("r"))

    async def _session(self, peer: Peer) -> None:
        self.begun.put_nowait(peer)


@pytest.fixture
def ours(tmp_path: Path) -> TestAuthority:
    """The cluster's authority."""
    return TestAuthority(tmp_path)


async def listening(fake: FakeScheduler, ours: TestAuthority) -> Server:
    anywhere = TlsAddress("127.0.0.1", 0)
    credentials = ours.credentials(Role.SCHEDULER)
    return await serve(anywhere, credentials, fake.on_link, roles=(Role.ROUTER,))


@asynccontextmanager
async def connecting(
    ours: TestAuthority, *fakes: FakeScheduler, before: tuple[str, ...] = ()
) -> AsyncIterator[Client]:
    servers = [await listening(fake, ours) for fake in fakes]
    client = Client([*before, *(str(server.address) for server in servers)], ours)
    running = asyncio.create_task(client.link.run())
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield client
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        for server in servers:
            server.close()


def test_addresses_where_nobody_serves_are_passed_over(ours: TestAuthority) -> None:
    async def talk() -> None:
        leader = FakeScheduler({})
        nobody = ("tls://127.0.0.1:1", "unix:/nonexistent/s.sock")
        async with connecting(ours, leader, before=nobody) as client:
            await client.begun.get()
            assert leader.hellos == 1

    asyncio.run(talk())


def test_a_scheduler_that_can_use_its_journal_is_preferred(ours: TestAuthority) -> None:
    async def talk() -> None:
        holding, leader = FakeScheduler({"is_holding": True}), FakeScheduler({})
        async with connecting(ours, holding, leader) as client:
            await client.begun.get()
            assert (holding.hellos, leader.hellos) == (1, 1)

    asyncio.run(talk())


def test_if_no_scheduler_can_use_its_journal_one_of_them_says_why(ours: TestAuthority) -> None:
    async def talk() -> None:
        both = [FakeScheduler({"is_holding": True}) for _ in range(2)]
        async with connecting(ours, *both) as client:
            await client.begun.get()
            assert [each.hellos for each in both] == [2, 1]

    asyncio.run(talk())


def test_a_scheduler_that_answers_no_heartbeat_is_left_and_another_is_found(
    ours: TestAuthority,
) -> None:
    async def talk() -> None:
        times = {"heartbeat_s": 0.05, "silence_s": 0.5}
        stopped, other = FakeScheduler(times), FakeScheduler(times)
        async with connecting(ours, stopped, other) as client:
            await client.begun.get()
            for _ in range(3):
                await stopped.beats.acquire()
            assert other.hellos == 0
            stopped.is_silent = True
            stopped.answer = {"is_holding": True}
            await client.ended.acquire()
            await client.begun.get()
            assert other.hellos == 1

    asyncio.run(talk())


def test_a_refusal_of_hello_ends_the_link_and_is_the_callers_matter(ours: TestAuthority) -> None:
    async def talk() -> None:
        refusing = FakeScheduler(PermissionDeniedError("not you"))
        server = await listening(refusing, ours)
        client = Client([str(server.address)], ours)
        async with asyncio.timeout(DEADLINE_S):
            with pytest.raises(PermissionDeniedError, match="not you"):
                await client.link.run()
        server.close()

    asyncio.run(talk())


def test_a_configuration_that_reaches_no_scheduler_is_refused() -> None:
    files = TlsFiles(ca="ca", certificate="c", key="k")
    check_scheduler(["unix:/s", "tls://head:1"], files)
    for addresses, told in (([], "empty"), (["/s"], "no address"), (["tls://h:1"], "set tls")):
        with pytest.raises(InvalidRequestError, match=told):
            check_scheduler(addresses, None)
