"""Processes of other users: served if they are named, as their own tenant, and never let write."""

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from plexrl.errors import PlexRLError
from plexrl.statemanager.protocol.channel import close_all
from plexrl.statemanager.protocol.connection import connect, exchange
from plexrl.statemanager.protocol.messages import OpenPublished
from plexrl.statemanager.protocol.tickets import TicketRole
from tests.statemanager.conftest import DEADLINE_S, Daemon, StartDaemon
from tests.statemanager.soak_worker import Command, Identity, Worker

OURS, THEIRS, NOBODYS = 61001, 61002, 61003
DEPLOYMENT = "job/actor"

pytestmark = pytest.mark.skipif(
    os.getuid() != 0, reason="only root can be other users: run the tests as root for this"
)


def move(identity: Identity) -> str:
    """Store, publish, load and read over; says what a published file's descriptor allows."""
    worker = Worker(identity)
    for what in ("snapshot", "publish", "offload", "load"):
        outcome = worker.carry_out(Command(what=what, seq=1))
        assert outcome.exact
    with connect(identity.path, DEADLINE_S, identity.ticket) as channel:
        _, fds = exchange(channel, OpenPublished(source=DEPLOYMENT, seq=1))
        try:
            # As another user's file, it cannot be opened anew for writing either.
            os.close(os.open(f"/proc/self/fd/{fds[0]}", os.O_RDWR))
        except PermissionError:
            return "reads only"
        finally:
            close_all(fds)
    return "writes"


def knock(identity: Identity) -> str:
    """Nothing but the greeting."""
    with connect(identity.path, DEADLINE_S, identity.ticket):
        return "let in"


def as_user(pipe: Connection, uid: int, act: Callable[[Identity], str], identity: Identity) -> None:
    os.setgid(uid)
    os.setuid(uid)
    try:
        pipe.send(act(identity))
    except PlexRLError as error:
        pipe.send(f"{error.code}: {error.message}")


def told(daemon: Daemon, uid: int, act: Callable[[Identity], str], **claims: Any) -> str:
    """The result of requests by a process of that user with such a ticket."""
    ticket = daemon.ticket(role=TicketRole.WORKER, job="job", deployment=DEPLOYMENT, **claims)
    identity = Identity(
        path=daemon.config.listen, deployment=DEPLOYMENT, rank=0, world_size=1, ticket=ticket
    )
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=as_user, args=(theirs, uid, act, identity))
    process.start()
    theirs.close()
    assert ours.poll(DEADLINE_S)
    said: str = ours.recv()
    process.join()
    ours.close()
    process.close()
    return said


@pytest.fixture
def daemon(start_daemon: StartDaemon) -> Daemon:
    """A daemon that serves two other users, one of whom is a tenant's."""
    daemon = start_daemon(served_uids=(OURS,), tenant_uids={"theirs": THEIRS})
    Path(daemon.config.listen).parent.chmod(0o711)
    return daemon


def test_a_served_user_moves_its_state_and_cannot_write_published_versions(
    daemon: Daemon,
) -> None:
    assert told(daemon, OURS, move) == "reads only"


def test_a_tenant_with_its_own_user_is_served_as_that_user(daemon: Daemon) -> None:
    assert told(daemon, THEIRS, move, tenant="theirs") == "reads only"


def test_another_user_cannot_use_a_tenants_ticket(daemon: Daemon) -> None:
    refused = told(daemon, OURS, knock, tenant="theirs")
    assert refused.startswith("permission_denied: user 61001 shows a ticket of tenant 'theirs'")
    assert told(daemon, THEIRS, knock).startswith("permission_denied: user 61002 shows")


def test_a_user_that_is_not_served_is_refused(daemon: Daemon) -> None:
    refused = told(daemon, NOBODYS, knock)
    assert refused.startswith("permission_denied: this StateManager does not serve user 61003")
