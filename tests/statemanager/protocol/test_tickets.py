"""A ticket lets its holder do what it says, and nothing else, whatever is asked."""

import os
import socket
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plexrl.errors import (
    AuthenticationError,
    InvalidRequestError,
    PermissionDeniedError,
    PlexRLError,
    QuotaExceededError,
    UnavailableError,
)
from plexrl.statemanager.checkpoint.format.retention import RetentionPolicy
from plexrl.statemanager.client.client import StateManagerClient
from plexrl.statemanager.config import TenantLimit
from plexrl.statemanager.daemon.handlers import HANDLERS
from plexrl.statemanager.device.backend import DeviceKind
from plexrl.statemanager.layout.keys import StateSlice
from plexrl.statemanager.layout.layout import lay_out
from plexrl.statemanager.layout.versions import Manifest, VersionKind
from plexrl.statemanager.protocol.channel import close_all
from plexrl.statemanager.protocol.connection import connect, exchange
from plexrl.statemanager.protocol.delta_policy import DeltaPolicy
from plexrl.statemanager.protocol.messages import (
    Confirm,
    Hello,
    Register,
    Release,
    Request,
    Usage,
)
from plexrl.statemanager.protocol.ticket_key import KEY_FILE, make_ticket_key, read_ticket_key
from plexrl.statemanager.protocol.tickets import AGENT, Claims, TicketKey, TicketRole
from plexrl.wire.messages import SaveRequest
from tests.statemanager.conftest import ALL_PARTS, DEADLINE_S, Daemon, MakeShard, Shard, StartDaemon

VICTIM = "victim/actor"
KEY = TicketKey(b"k" * 32)
WORKER = Claims(role=TicketRole.WORKER, job="job", deployment="job/actor")


def ask(daemon: Daemon, ticket: bytes, *requests: Request) -> Any:
    """The answer to the last of the requests, on a connection of their own."""
    answer = None
    with connect(daemon.config.listen, DEADLINE_S, ticket) as channel:
        for request in requests:
            answer, fds = exchange(channel, request)
            close_all(fds)
    return answer


# The ticket itself


def test_a_ticket_says_what_was_signed() -> None:
    assert KEY.verify(KEY.mint(WORKER)) == WORKER
    assert KEY.verify(KEY.mint(AGENT)) == AGENT


@given(st.data())
def test_a_ticket_with_anything_changed_is_refused(data: st.DataObject) -> None:
    ticket = KEY.mint(WORKER)
    forged = data.draw(
        st.binary(max_size=200)
        | st.integers(0, len(ticket) - 1).map(
            lambda at: ticket[:at] + bytes([ticket[at] ^ 1]) + ticket[at + 1 :]
        )
        | st.integers(0, len(ticket) - 1).map(lambda end: ticket[:end])
    )
    with pytest.raises(AuthenticationError):
        KEY.verify(forged)


def test_a_ticket_of_another_key_is_refused() -> None:
    with pytest.raises(AuthenticationError, match="not signed with this node's key"):
        TicketKey(b"l" * 32).verify(KEY.mint(AGENT))


@pytest.mark.parametrize(
    "claims",
    [
        {"deployment": "job/actor", "job": "other"},
        {"deployment": "", "job": ""},
        {"deployment": "job/actor", "job": "job", "rank": 1},
        {"deployment": "job/actor", "job": "job", "may_pull": ("other/actor",)},
    ],
)
def test_a_ticket_that_crosses_jobs_cannot_be_made(claims: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        Claims(role=TicketRole.WORKER, **claims)


# The key


def test_the_key_is_made_once_and_for_its_user_only(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "ticket.key"
    with pytest.raises(UnavailableError):
        read_ticket_key(path)
    ticket = make_ticket_key(path).mint(AGENT)
    assert path.stat().st_mode & 0o777 == 0o600
    assert make_ticket_key(path).verify(ticket) == read_ticket_key(path).verify(ticket) == AGENT
    assert [entry.name for entry in path.parent.iterdir()] == ["ticket.key"]
    path.chmod(0o640)
    with pytest.raises(PermissionDeniedError, match="other users can mint"):
        read_ticket_key(path)
    path.chmod(0o600)
    path.write_bytes(b"short")
    with pytest.raises(InvalidRequestError, match="at least 32 bytes"):
        read_ticket_key(path)


def test_a_ticket_survives_the_daemon(start_daemon: StartDaemon, make_shard: MakeShard) -> None:
    daemon = start_daemon(ticket_key_file=None)
    assert daemon.config.ticket_key_path == Path(daemon.config.nvme_dir) / KEY_FILE
    shard = make_shard(daemon)
    shard.fill(1)
    shard.offload(1)
    daemon.terminate()
    daemon.start()
    shard.load(1)
    assert np.array_equal(shard.contents, shard.version(1))


# What the daemon makes of it


def test_nothing_is_answered_before_a_ticket(daemon: Daemon) -> None:
    with pytest.raises(AuthenticationError):
        ask(daemon, b"")
    with pytest.raises(AuthenticationError):
        ask(daemon, KEY.mint(AGENT))


def test_every_other_request_needs_a_role() -> None:
    assert [kind for kind, entry in HANDLERS.items() if not entry.roles] == [Hello]


@pytest.mark.parametrize(
    "change",
    [{"deployment": "job/critic"}, {"rank": 1}, {"world_size": 3}, {"group": "h"}],
    ids=lambda change: next(iter(change)),
)
def test_a_worker_registers_as_what_its_ticket_says(daemon: Daemon, change: dict[str, Any]) -> None:
    own = {"deployment": "job/actor", "rank": 0, "world_size": 2, "group": "g"}
    ticket = daemon.ticket(role=TicketRole.WORKER, job="job", **own)
    arena: dict[str, Any] = {"slices": (), "arena_bytes": 1, "kind": DeviceKind.CPU, "device": 0}
    request = Register(**{**own, **change}, **arena, token=1)
    with pytest.raises(PermissionDeniedError, match=r"job/actor|group 'g'"):
        ask(daemon, ticket, request)


def test_a_later_incarnation_ends_the_tickets_of_earlier_ones(daemon: Daemon) -> None:
    def ticket(incarnation: int, rank: int = 0) -> bytes:
        return daemon.ticket(
            role=TicketRole.WORKER,
            job="job",
            deployment="job/actor",
            rank=rank,
            world_size=2,
            incarnation=incarnation,
        )

    with connect(daemon.config.listen, DEADLINE_S, ticket(1)) as former:
        ask(daemon, ticket(2), Confirm())
        with pytest.raises(PermissionDeniedError, match="2 is newer"):
            ask(daemon, ticket(1), Confirm())
        own = Register(
            deployment="job/actor",
            rank=0,
            world_size=2,
            group="g",
            token=1,
            slices=(),
            arena_bytes=1,
            kind=DeviceKind.CPU,
            device=0,
        )
        with pytest.raises(PermissionDeniedError, match="2 is newer"):
            exchange(former, own)
    ask(daemon, ticket(1, rank=1), Confirm())
    daemon.kill()
    daemon.start()
    with pytest.raises(PermissionDeniedError, match="2 is newer"):
        ask(daemon, ticket(1), Confirm())
    ask(daemon, ticket(1, rank=1), Confirm())
    ask(daemon, daemon.ticket(role=TicketRole.AGENT), Release(deployment="job/actor"))
    ask(daemon, ticket(1), Confirm())


def test_a_connection_keeps_its_ticket(daemon: Daemon) -> None:
    mine, other = daemon.worker_ticket("job/actor"), daemon.worker_ticket("job/critic")
    ask(daemon, mine, Hello(ticket=mine), Confirm())
    with pytest.raises(PlexRLError, match="open another"):
        ask(daemon, mine, Hello(ticket=other))


def test_tenants_with_users_of_their_own_are_served_as_these_only(
    start_daemon: StartDaemon,
) -> None:
    me = os.getuid()
    daemon = start_daemon(tenant_uids={"mine": me, "theirs": me + 1})
    claims = {"role": TicketRole.WORKER, "job": "job", "deployment": "job/actor"}
    ask(daemon, daemon.ticket(**claims, tenant="mine"), Confirm())
    for tenant in ("theirs", "third", ""):
        with pytest.raises(PermissionDeniedError, match="not its own"):
            ask(daemon, daemon.ticket(**claims, tenant=tenant), Confirm())


def test_a_worker_sees_its_own_usage(daemon: Daemon, make_shard: MakeShard) -> None:
    for name in ("job/actor", VICTIM):
        make_shard(daemon, deployment=name).snapshot(1)
    seen = ask(daemon, daemon.worker_ticket("job/actor"), Usage())
    assert set(seen) == {"node", "deployments"}
    assert set(seen["deployments"]) == {"job/actor"}


def test_a_ticket_may_name_the_deployments_it_pulls_from(
    daemon: Daemon, make_shard: MakeShard
) -> None:
    for name in ("job/actor", "job/critic"):
        make_shard(daemon, deployment=name).client.publish(seq=1, token=1)
    ticket = daemon.ticket(
        role=TicketRole.WORKER, job="job", deployment="job/rollout", may_pull=("job/actor",)
    )
    shard = make_shard(daemon, deployment="job/rollout", registered=False)
    with closing(
        StateManagerClient(
            daemon.config.listen, deployment="job/rollout", rank=0, world_size=1, ticket=ticket
        )
    ) as client:
        client.register(shard.arena, shard.slices, group="g", token=1)
        wants = [shard.slices[0]]
        client.pull(sources=[daemon.config.listen], source="job/actor", seq=1, wants=wants)
        with pytest.raises(PermissionDeniedError, match="from job/actor, not from 'job/critic'"):
            client.pull(sources=[daemon.config.listen], source="job/critic", seq=1, wants=wants)


# No request, however made, reaches another job


# Made at random these are seldom any.
COUNTS = st.none() | st.integers(1, 3)
st.register_type_strategy(
    RetentionPolicy, st.builds(RetentionPolicy, keep_last=COUNTS, keep_every=COUNTS)
)
st.register_type_strategy(DeltaPolicy, st.just(DeltaPolicy()))


def values(hint: Any, manifest: Manifest) -> st.SearchStrategy[Any]:
    """Values of a field that aim at the victim."""
    if hint is str:
        return st.sampled_from([VICTIM, "victim/", "job/actor", "g", "", "../victim", "{}"])
    if hint is int:
        return st.sampled_from([0, 1, 2, -1, 1 << 40])
    if hint is Manifest:
        return st.just(manifest)
    if hint == tuple[StateSlice, ...]:
        return st.sampled_from([(), manifest.slices])
    if hint is bytes:
        return st.sampled_from([b"", b"x" * 40])
    return st.from_type(hint)


def manifest_of(shard: Shard) -> Manifest:
    layout = lay_out(shard.slices)
    return Manifest(
        deployment=VICTIM,
        rank=0,
        world_size=1,
        seq=1,
        kind=VersionKind.STATE,
        parts=(),
        meta_json="{}",
        slices=shard.slices,
        extents=layout.extents,
        nbytes=layout.nbytes,
        sections=layout.sections,
        stamp="s",
    )


def requests(manifest: Manifest) -> st.SearchStrategy[Request]:
    """Of any type that the daemon knows."""

    def of(kind: type[Request]) -> st.SearchStrategy[Request]:
        hints = get_type_hints(kind)
        fields = {name: values(hints[name], manifest) for name in kind.__struct_fields__}
        return st.builds(kind, **fields)

    return st.sampled_from(list(HANDLERS)).flatmap(of)


class Attack:
    """A victim with state, stored and published, and another job's worker."""

    def __init__(self, daemon: Daemon, victim: Shard) -> None:
        self.daemon, self.victim = daemon, victim
        victim.fill(1)
        victim.snapshot(1)
        victim.client.publish(seq=1, token=1)
        self.ticket = daemon.worker_ticket("job/actor")

    def seen_by_the_agent(self) -> Any:
        return self.victim.agent.usage()["deployments"][VICTIM]

    def make(self, asked: Sequence[Request], fd: int | None) -> None:
        before = self.seen_by_the_agent()
        with connect(self.daemon.config.listen, DEADLINE_S, self.ticket) as channel:
            for request in asked:
                try:
                    answer, fds = exchange(channel, request, [] if fd is None else [fd])
                except PlexRLError:
                    continue
                opened = len(fds)
                close_all(fds)
                assert not opened, f"{request} opened something"
                assert "victim" not in msgspec.json.encode(answer).decode(), request
        assert self.seen_by_the_agent() == before


def test_no_worker_reaches_another_jobs_state(daemon: Daemon, make_shard: MakeShard) -> None:
    victim = make_shard(daemon, deployment=VICTIM, elements=1024)
    attack = Attack(daemon, victim)
    manifest = manifest_of(victim)

    @settings(
        max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
    )
    @given(st.lists(requests(manifest), min_size=1, max_size=6), st.booleans())
    def tried(asked: list[Request], with_descriptor: bool) -> None:
        attack.make(asked, victim.arena.segments[0].fd if with_descriptor else None)

    tried()
    victim.load(1)
    assert np.array_equal(victim.contents, victim.version(1))


def test_an_agent_may_name_every_state(daemon: Daemon, make_shard: MakeShard) -> None:
    make_shard(daemon, deployment=VICTIM).snapshot(1)
    agent = daemon.ticket(role=TicketRole.AGENT)
    assert VICTIM in ask(daemon, agent, Usage())["deployments"]
    ask(daemon, agent, Release(deployment=VICTIM))
    assert VICTIM not in ask(daemon, agent, Usage())["deployments"]


def test_a_tenant_that_is_at_its_quota_is_refused_and_others_are_not(
    start_daemon: StartDaemon, make_shard: MakeShard
) -> None:
    daemon = start_daemon(
        tenant_bytes_max=1024, tenant_limits={"large": TenantLimit(host_bytes=1024)}
    )
    shard = make_shard(daemon, registered=False)

    def client(tenant: str) -> closing[StateManagerClient]:
        ticket = daemon.ticket(
            role=TicketRole.WORKER, tenant=tenant, job="job", deployment="job/actor", group="g"
        )
        return closing(
            StateManagerClient(
                daemon.config.listen, deployment="job/actor", rank=0, world_size=1, ticket=ticket
            )
        )

    order = SaveRequest(seq=1, token=1)
    expected = shard.fill(1)
    with client("small") as small:
        small.register(shard.arena, shard.slices, group="g", token=1)
        with pytest.raises(QuotaExceededError, match="tenant 'small'"):
            small.offload(order, parts=ALL_PARTS)
    with client("large") as large:
        large.register(shard.arena, shard.slices, group="g", token=1)
        assert large.offload(order, parts=ALL_PARTS).tier == "nvme"
        large.load(seq=1, token=1)
    assert np.array_equal(shard.contents, expected)
    assert list(shard.agent.usage()["tenants"]) == ["large"]


def test_an_agents_ticket_is_not_shown_to_whoever_a_worker_names(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen()
        with pytest.raises(PermissionDeniedError, match="not by user"):
            connect(path, DEADLINE_S, b"secret", of_user=os.getuid() + 1)
        shown, _ = listener.accept()
        with shown:
            assert shown.recv(1) == b""
