"""The scheduler's TLS port: who may say what, broken frames, heartbeats, leases, rotation."""

import asyncio
import random
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plexrl import errors
from plexrl.scheduler.rules.config import SchedulerConfig
from plexrl.scheduler.state.messages.events import TimerFired
from plexrl.wire.framing import encode_head
from plexrl.wire.links.address import TlsAddress
from plexrl.wire.links.credentials import Credentials, Role, TlsFiles
from plexrl.wire.links.dial import connect
from plexrl.wire.rpc import Peer
from tests.certificates import TestAuthority
from tests.examples import examples
from tests.scheduler.live_service import (
    OPERATOR,
    Live,
    Plain,
    greeting,
    live,
    pass_time,
    run_live,
    until,
)

LEASE_S = 60.0
GRACE_S = 5.0
REFUSALS = (errors.AuthenticationError, errors.PermissionDeniedError, ConnectionResetError)
ANY_PORT = "tls://127.0.0.1:0"


@asynccontextmanager
async def networked(folder: Path, ours: TestAuthority, **changes: object) -> AsyncIterator[Live]:
    """A scheduler with a Unix socket and a TLS port."""
    listen = (f"unix:{folder}/s.sock", ANY_PORT)
    times = {"node_lease_s": LEASE_S, "node_grace_s": GRACE_S}
    tls = ours.files(Role.SCHEDULER)
    async with live(folder, **{"listen": listen, "tls": tls, **times, **changes}) as cluster:
        yield cluster


@pytest.fixture
def ours(tmp_path: Path) -> TestAuthority:
    """The cluster's authority."""
    return TestAuthority(tmp_path / "ours")


async def ended(peer: Peer) -> None:
    """Return when the other side has ended the connection."""
    while True:
        try:
            await peer.call("beat")
        except errors.ConnectionLostError:
            return
        except errors.PlexRLError:
            continue


async def answer_of(reader: asyncio.StreamReader) -> bytes:
    """What a server says before it ends the connection."""
    try:
        return await reader.read()
    except OSError:
        return b""


async def state_of(cluster: Live, node: str) -> str:
    """`ready`, `expected` (not connected since the scheduler started) or `lost`, after all earlier
    events."""
    shell = cluster.service.shell
    await shell.report(TimerFired())
    records = shell.core.records(0.0)
    records.look(0.0)
    return records.newest()[f"nodes/{node}"].state


async def due(seconds: float) -> None:
    """Let time pass in small steps, so that tasks run in between."""
    for _ in range(20):
        pass_time(seconds / 20)
        for _ in range(20):
            await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("role", "name", "hello"),
    [
        (Role.NODE, "n", {"role": "router", "router": "n"}),
        (Role.NODE, "n", greeting("other")),
        (Role.NODE, "n", greeting("")),
        (Role.ROUTER, "r", {"role": "router", "router": "other"}),
        (Role.ROUTER, "r", greeting("r")),
    ],
)
def test_a_process_that_says_what_its_certificate_does_not_is_refused_and_disconnected(
    tmp_path: Path, ours: TestAuthority, role: Role, name: str, hello: Plain
) -> None:
    async def talk() -> None:
        async with networked(tmp_path, ours) as cluster:
            liar = await cluster.connect(credentials=ours.credentials(role, name))
            with pytest.raises(errors.PermissionDeniedError, match="certificate is that of"):
                await liar.call("hello", hello)
            await ended(liar)
            core = cluster.service.shell.core
            assert not core.list_nodes()
            assert not core.status(0.0)["routers"]

    run_live(talk)


def test_certificates_of_other_processes_clusters_and_times_do_not_get_in(
    tmp_path: Path, ours: TestAuthority
) -> None:
    theirs = TestAuthority(tmp_path / "theirs").files(Role.NODE, "n")
    own = ours.files(Role.NODE, "n")
    mixed = TlsFiles(ca=own.ca, certificate=theirs.certificate, key=theirs.key)

    async def talk() -> None:
        async with networked(tmp_path, ours) as cluster:
            for refused in (
                Credentials(mixed),
                ours.credentials(Role.NODE, "late", life=timedelta(seconds=-1)),
                ours.credentials(Role.SCHEDULER),
                ours.credentials(Role.HEAD),
            ):
                with pytest.raises(REFUSALS):
                    await cluster.connect(credentials=refused)
            anonymous = ssl.create_default_context(cafile=own.ca)
            anonymous.check_hostname = False
            address = cluster.tls_address
            assert isinstance(address, TlsAddress)
            reader, writer = await asyncio.open_connection(
                address.host, address.port, ssl=anonymous
            )
            assert await answer_of(reader) == b"", "a client without a certificate got an answer"
            writer.close()
            await cluster.agent("n", credentials=ours.credentials(Role.NODE, "n"))

    run_live(talk)


frames = st.one_of(
    st.binary(max_size=200),
    st.dictionaries(
        st.sampled_from(["call", "method", "params", "answer", "result", "error", "x"]),
        st.recursive(
            st.one_of(
                st.none(),
                st.integers(-(2**63), 2**63 - 1),
                st.floats(allow_nan=False),
                st.sampled_from(["hello", "beat", "run", "submit_job", "router", "agent"]),
                st.binary(max_size=8),
            ),
            lambda inner: st.one_of(
                st.lists(inner, max_size=3),
                st.dictionaries(st.sampled_from(["role", "router", "node"]), inner, max_size=3),
            ),
            max_leaves=6,
        ),
        max_size=4,
    ).map(lambda header: encode_head(header, 0)),
)


def test_fuzzed_frames_end_their_connection_and_nothing_else(
    tmp_path: Path, ours: TestAuthority
) -> None:
    router, node = ours.credentials(Role.ROUTER, "r"), ours.credentials(Role.NODE, "n")

    @settings(
        max_examples=examples(60),
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
    @given(sent=st.lists(frames, min_size=1, max_size=4), as_router=st.booleans())
    def fuzz(sent: list[bytes], as_router: bool) -> None:
        async def talk() -> None:
            credentials = ours_r if as_router else ours_x
            link = await connect(cluster.tls_address, credentials, role=Role.SCHEDULER)
            link.writer.write(b"".join(sent))
            link.writer.close()
            await agent.call("beat")
            assert (await honest.call("status", OPERATOR))["routers"] >= 1

        loop.run_until_complete(talk())

    ours_r, ours_x = ours.credentials(Role.ROUTER, "fuzz"), ours.credentials(Role.NODE, "fuzz")
    loop = asyncio.new_event_loop()
    try:
        context = networked(tmp_path, ours)
        cluster = loop.run_until_complete(context.__aenter__())
        honest = loop.run_until_complete(cluster.router("r", credentials=router))
        agent = loop.run_until_complete(cluster.agent("n", credentials=node))
        fuzz()
        loop.run_until_complete(context.__aexit__(None, None, None))
    finally:
        loop.close()


def test_noise_in_place_of_a_handshake_ends_its_connection_and_nothing_else(
    tmp_path: Path, ours: TestAuthority
) -> None:
    async def talk() -> None:
        chance = random.Random(5)
        async with networked(tmp_path, ours) as cluster:
            agent = await cluster.agent("n", credentials=ours.credentials(Role.NODE, "n"))
            address = cluster.tls_address
            for _ in range(20):
                reader, writer = await asyncio.open_connection(address.host, address.port)
                writer.write(b"\xff" + chance.randbytes(chance.randrange(1, 2000)))
                # At most an alert of TLS.
                assert len(await answer_of(reader)) < 16
                writer.close()
            assert "lease_s" in await agent.call("beat")

    run_live(talk)


def test_new_certificates_are_used_without_a_restart_and_open_links_go_on(
    tmp_path: Path, ours: TestAuthority
) -> None:
    async def talk() -> None:
        async with networked(tmp_path, ours) as cluster:
            credentials = ours.credentials(Role.NODE, "n")
            agent = await cluster.agent("n", credentials=credentials)
            # Both are the files of the running processes, written anew.
            ours.files(Role.NODE, "n")
            newest = await asyncio.to_thread(Path(ours.files(Role.SCHEDULER).certificate).read_text)
            link = await connect(cluster.tls_address, credentials, role=Role.SCHEDULER)
            shown = link.writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
            assert ssl.DER_cert_to_PEM_cert(shown) == newest
            link.writer.close()
            assert "lease_s" in await agent.call("beat")

    run_live(talk)


def test_a_revoked_node_is_disconnected_and_the_others_are_told(
    tmp_path: Path, ours: TestAuthority
) -> None:
    async def talk() -> None:
        async with networked(tmp_path, ours) as cluster:
            stolen = ours.files(Role.NODE, "stolen")
            thief = Credentials(replace(stolen, crl=""))
            lost = await cluster.agent("stolen", credentials=thief)
            honest = await cluster.agent("n", credentials=ours.credentials(Role.NODE, "n"))
            assert "crl" not in await honest.call("beat", {"crl_number": 0})
            ours.revoke(stolen)
            told = (await honest.call("beat", {"crl_number": 0}))["crl"]
            assert told == await asyncio.to_thread(ours.crl.read_text)
            known = ours.credentials(Role.ROUTER, "r").revoked
            assert "crl" not in await honest.call("beat", {"crl_number": known.number})
            assert "crl" not in await honest.call("beat"), "a process that keeps no list"
            await ended(lost)
            with pytest.raises(errors.AuthenticationError, match="revoked"):
                await cluster.agent("stolen", credentials=thief)
            assert "lease_s" in await honest.call("beat")

    run_live(talk)


def test_a_silent_process_is_disconnected_and_one_that_sends_heartbeats_is_not(
    tmp_path: Path, ours: TestAuthority
) -> None:
    async def talk() -> None:
        async with networked(tmp_path, ours) as cluster:
            silent = await cluster.router(
                "silent", credentials=ours.credentials(Role.ROUTER, "silent")
            )
            node = await cluster.agent("n", credentials=ours.credentials(Role.NODE, "n"))
            near = await cluster.router("near")
            shell = cluster.service.shell
            for _ in range(10):
                await due(LEASE_S / 10)
                assert (await node.call("beat"))["lease_s"] == LEASE_S
            await until(lambda: shell.core.status(0.0)["routers"] == 1)
            with pytest.raises(errors.ConnectionLostError):
                await silent.call("status", OPERATOR)
            assert (await near.call("status", OPERATOR))["routers"] == 1

    run_live(talk)


def test_a_node_is_not_lost_before_the_lease_it_was_granted_last_has_run_out(
    tmp_path: Path, ours: TestAuthority
) -> None:
    async def talk() -> None:
        async with networked(tmp_path, ours) as cluster:
            far = await cluster.agent("far", credentials=ours.credentials(Role.NODE, "far"))
            near = await cluster.agent("near")
            await due(LEASE_S / 6)
            await far.call("beat")
            await cluster.leave(far)
            await cluster.leave(near)
            await until(lambda: not cluster.service.shell.agents.connected())
            await due(LEASE_S * 0.9)
            assert await state_of(cluster, "far") == "ready"
            assert await state_of(cluster, "near") == "lost", "there is no lease on one machine"
            await due(LEASE_S * 0.2 + GRACE_S)
            assert await state_of(cluster, "far") == "lost"

    run_live(talk)


def test_a_second_machine_with_a_nodes_name_waits_for_the_lease_of_the_first(
    tmp_path: Path, ours: TestAuthority
) -> None:
    async def talk() -> None:
        async with networked(tmp_path, ours) as cluster:
            credentials = ours.credentials(Role.NODE, "n")
            first = await cluster.agent("n", credentials=credentials, machine="a")
            with pytest.raises(errors.UnavailableError, match="another machine"):
                await cluster.agent("n", credentials=credentials, machine="b")
            again = await cluster.agent("n", credentials=credentials, machine="a")
            await ended(first)
            await cluster.leave(again)
            await due(LEASE_S * 0.9)
            with pytest.raises(errors.UnavailableError, match="another machine"):
                await cluster.agent("n", credentials=credentials, machine="b")
            await due(LEASE_S * 0.2)
            await cluster.agent("n", credentials=credentials, machine="b")

    run_live(talk)


def test_a_restarted_scheduler_knows_on_which_machine_each_node_was(
    tmp_path: Path, ours: TestAuthority
) -> None:
    async def talk() -> None:
        credentials = ours.credentials(Role.NODE, "n")
        async with networked(tmp_path, ours) as cluster:
            await cluster.agent("n", credentials=credentials, machine="a")
        async with networked(tmp_path, ours) as cluster:
            with pytest.raises(errors.UnavailableError, match="another machine"):
                await cluster.agent("n", credentials=credentials, machine="b")
            first = await cluster.agent("n", credentials=credentials, machine="a")
            await cluster.leave(first)
            await due(LEASE_S * 1.2)
            await cluster.agent("n", credentials=credentials, machine="b")

    run_live(talk)


def test_a_scheduler_that_may_not_lead_any_more_grants_no_leases(
    tmp_path: Path, ours: TestAuthority
) -> None:
    async def talk() -> None:
        async with networked(tmp_path, ours, lease_s=10.0) as cluster:
            confirmed_at = asyncio.get_running_loop().time()
            cluster.service._lead_confirmed_at = lambda: confirmed_at
            agent = await cluster.agent("n", credentials=ours.credentials(Role.NODE, "n"))
            assert (await agent.call("beat"))["lease_s"] == LEASE_S
            await due(11.0)
            assert (await agent.call("beat"))["lease_s"] == 0.0

    run_live(talk)


def test_after_a_restart_known_nodes_have_the_full_lease_to_come_back(
    tmp_path: Path, ours: TestAuthority
) -> None:
    async def talk() -> None:
        async with networked(tmp_path, ours) as cluster:
            await cluster.agent("n", credentials=ours.credentials(Role.NODE, "n"))
        # The new scheduler is told a shorter lease than the former one granted.
        async with networked(tmp_path, ours, node_lease_s=1.0, lease_s=2.0) as cluster:
            await due(LEASE_S)
            assert await state_of(cluster, "n") == "expected"
            await due(10.0)
            assert await state_of(cluster, "n") == "lost"

    run_live(talk)


@pytest.mark.parametrize(
    ("listen", "told"),
    [((), "at least one"), (("s.sock",), "no address"), (("tcp://0.0.0.0:1",), "no address")],
)
def test_a_scheduler_listens_at_no_other_addresses(listen: tuple[str, ...], told: str) -> None:
    with pytest.raises(errors.InvalidRequestError, match=told):
        SchedulerConfig(listen=listen, journal="j", operator_key_digest="")


def test_a_tls_port_needs_a_certificate() -> None:
    with pytest.raises(errors.InvalidRequestError, match="set tls"):
        SchedulerConfig(listen=(ANY_PORT,), journal="j", operator_key_digest="")
