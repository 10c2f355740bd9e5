"""Floods of connections that never finish their handshake."""

import asyncio
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plexrl.wire.framing import read_frame, write_frame
from plexrl.wire.links.address import TlsAddress
from plexrl.wire.links.credentials import Role
from plexrl.wire.links.dial import Link, connect, serve
from plexrl.wire.links.handshakes import HANDSHAKES_MAX, Handshakes, client_network
from tests.certificates import TestAuthority
from tests.half_open import half_open, is_ended

ANY_PORT = TlsAddress("127.0.0.1", 0)
SURPLUS = 100


@pytest.fixture
def ours(tmp_path: Path) -> TestAuthority:
    return TestAuthority(tmp_path)


def test_a_flood_replaces_its_oldest_connections_and_an_authenticated_process_gets_in(
    ours: TestAuthority,
) -> None:
    async def said(link: Link) -> None:
        with closing(link.writer):
            await write_frame(link.writer, (await read_frame(link.reader))[0])

    async def run() -> None:
        scheduler, node = ours.credentials(Role.SCHEDULER), ours.credentials(Role.NODE, "a")
        server = await serve(ANY_PORT, scheduler, said, roles={Role.NODE})
        assert isinstance(server.address, TlsAddress)
        early = await connect(server.address, node, role=Role.SCHEDULER)
        opening = half_open(server.address, HANDSHAKES_MAX + SURPLUS)
        flood = await asyncio.to_thread(opening.__enter__)
        # Those above the bound have replaced the oldest.
        for raw in flood[:SURPLUS]:
            assert await asyncio.to_thread(is_ended, raw)
        flood[-1].setblocking(False)
        with pytest.raises(BlockingIOError):
            flood[-1].recv(1)
        late = await connect(server.address, node, role=Role.SCHEDULER)
        for link in (early, late):
            await write_frame(link.writer, {"said": "hello"})
            assert (await read_frame(link.reader))[0] == {"said": "hello"}
            link.writer.close()
        server.close()
        opening.__exit__(None, None, None)

    asyncio.run(run())


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=60))
def test_the_bound_holds_and_the_oldest_of_the_client_with_most_is_replaced(
    steps: list[tuple[int, bool]],
) -> None:
    handshakes = Handshakes(5)
    held: dict[int, list[int]] = {client: [] for client in range(4)}
    victims: list[int] = []
    for number, (client, ends) in enumerate(steps):
        if ends:
            if held[client]:
                handshakes.ended(held[client].pop(0))
            continue
        most = max(len(each) for each in held.values())
        allowed = {each[0] for each in held.values() if len(each) == most > 0}
        is_full = sum(map(len, held.values())) == 5
        handshakes.begin(number, f"10.0.0.{client}", partial(victims.append, number))
        if is_full:
            (victim,) = victims
            assert victim in allowed
            next(each for each in held.values() if victim in each).remove(victim)
            victims.clear()
        assert not victims
        held[client].append(number)


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("10.1.2.3", "10.1.2.3"),
        ("::ffff:10.1.2.3", "10.1.2.3"),
        ("2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
    ],
)
def test_a_client_is_one_ipv4_address_or_one_network_of_ipv6(address: str, network: str) -> None:
    assert client_network(address) == network
