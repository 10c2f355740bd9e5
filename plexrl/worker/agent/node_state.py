"""Handlers of the scheduler's commands about state, which the node's StateManager carries out.

If a call is repeated while it runs, it joins the running one. So the scheduler can simply retry
after a timeout or a lost connection.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from plexrl.errors import PlexRLError
from plexrl.process.children.pulse import Pulse
from plexrl.statemanager.checkpoint.requests import CheckpointStatus
from plexrl.statemanager.client.client import StateManagerClient
from plexrl.statemanager.client.migration import migrate
from plexrl.statemanager.client.reports import MoveReport
from plexrl.statemanager.protocol.network import NO_NETWORK, Network
from plexrl.statemanager.protocol.ticket_key import read_ticket_key
from plexrl.statemanager.protocol.tickets import AGENT, Claims
from plexrl.wire.messages import MigrateState, PrefetchState, ReleaseState
from plexrl.wire.messages.node_queries import Checkpoints, ListCheckpoints
from plexrl.wire.rpc import Handler, as_type, method_of, on_command, on_message, read_message
from plexrl.worker.agent.state_watch import Changes, StateWatch

LOG = logging.getLogger(__name__)

CALL_TIMEOUT_S = 30.0
MIGRATIONS_MAX = 2
"""Most concurrent migrations; a single one nearly uses the memory bandwidth."""
HINTS_MAX = 16
"""Most concurrent prefetch hints; more are dropped."""

WATCH_S = 1.0
"""Interval of queries for the locations of state."""

_Move = tuple[str, int, tuple[int, ...]]
"""Deployment, seq and ranks."""


class NodeState:
    """Handles calls about state, for one node."""

    def __init__(
        self,
        node: str,
        statemanager: str,
        ticket_key_file: Path,
        network: Network = NO_NETWORK,
        pulse: Pulse | None = None,
    ) -> None:
        """Name of the node, paths of its StateManager's socket and key, and the way to others.
        `pulse` beats with each answer about the locations of state."""
        self.pulse = pulse or Pulse(0.0)
        self.reasons: tuple[str, ...] = ()
        """Why the StateManager is not healthy, as it said last."""
        self._node = node
        self._path = statemanager
        self._network = network
        self._key_file = ticket_key_file
        self._migrations: dict[_Move, asyncio.Task[MoveReport]] = {}
        self._may_migrate = asyncio.Semaphore(MIGRATIONS_MAX)
        self._arrived: dict[str, set[int]] = {}
        """By deployment, the ranks that were migrated to this node since its last launch."""
        self._dropping = asyncio.Lock()
        """Held while versions of former ranks are dropped, when none may arrive."""
        self._watch = StateWatch(self._client)
        self._hints: set[asyncio.Task[None]] = set()

    def handlers(self) -> dict[str, Handler]:
        """The handlers of the scheduler's commands and questions about state."""
        return {
            "release_state": on_command(as_type(ReleaseState), self._release),
            "migrate_state": on_command(as_type(MigrateState), self._migrate),
            "prefetch_state": on_command(as_type(PrefetchState), self._prefetch),
            method_of(ListCheckpoints): on_message(ListCheckpoints, self._list_checkpoints),
        }

    async def deployments(self) -> list[str]:
        """The deployments of which the node holds some state."""

        def request() -> list[str]:
            with closing(self._client()) as client:
                return sorted(client.usage()["deployments"])

        return await asyncio.to_thread(request)

    async def _release(self, command: ReleaseState) -> None:
        """Drop a deployment's versions, including those that are migrating to this node."""
        deployment = command.deployment
        self._arrived.pop(deployment, None)

        def release() -> None:
            with closing(self._client()) as client:
                client.release(deployment)

        arriving = [task for move, task in self._migrations.items() if move[0] == deployment]
        if arriving:
            await asyncio.wait(arriving)
        await asyncio.to_thread(release)

    async def keep_ranks(self, deployment: str, ranks: Iterable[int]) -> None:
        """Drop the versions of ranks that ran on this node before a move and run on another now.
        Call this when `ranks` are launched here, after every rank's version has arrived."""

        def release(kept: set[int]) -> None:
            with closing(self._client()) as client:
                client.release(deployment, kept_ranks=tuple(sorted(kept)))

        async with self._dropping:
            # A late launch must not drop what a later move has brought.
            kept = {*ranks, *self._arrived.pop(deployment, ())}
            try:
                await asyncio.to_thread(release, kept)
            except PlexRLError as error:
                LOG.warning("versions of former ranks of %s stay here: %s", deployment, error)

    async def watch(self, report: Callable[[Changes], None]) -> None:
        """Call `report` with all locations of state, then with every change, until cancelled."""
        await asyncio.to_thread(self._watch.reset)
        # It has just answered: the scheduler was told what it holds.
        self.pulse.beat()
        while True:
            try:
                changes = await asyncio.to_thread(self._watch.changes)
            except PlexRLError as error:
                LOG.info("cannot query the locations of state now: %s", error)
            else:
                self.pulse.beat()
                self.reasons = changes.reasons
                report(changes)
            await asyncio.sleep(WATCH_S)

    async def _migrate(self, command: MigrateState) -> dict[str, Any]:
        """Copy a version to this node from the StateManagers that the command names: the
        part of the ranks that will run here.

        Raises:
            PlexRLError: as `plexrl.statemanager.client.migration.migrate`.
        """
        ranks = tuple(placed.rank for placed in command.ranks if placed.node == self._node)
        move = command.deployment, command.seq, ranks
        task = self._migrations.get(move)
        self._arrived.setdefault(command.deployment, set()).update(ranks)
        if task is None:
            task = asyncio.create_task(self._copy(move, command.sources))
            self._migrations[move] = task
            task.add_done_callback(lambda done: self._end(move, done))
        # The connection may end and cancel this handler, but not the migration.
        return asdict(await asyncio.shield(task))

    async def _prefetch(self, command: PrefetchState) -> None:
        """Pass on the hint that a version will be loaded soon. Returns at once and never fails."""
        if len(self._hints) >= HINTS_MAX:
            LOG.info("too many prefetch hints at once: one is dropped")
            return
        task = asyncio.create_task(self._hint(command))
        self._hints.add(task)
        task.add_done_callback(self._hints.discard)

    async def _list_checkpoints(self, asked: ListCheckpoints) -> Checkpoints:
        """A job's checkpoints: those on disk, and those that are being written."""
        status = CheckpointStatus(deployment=f"{asked.job}/")

        def request() -> Checkpoints:
            with closing(self._client()) as client:
                return read_message(client.request(status), Checkpoints)

        return await asyncio.to_thread(request)

    def ticket(self, claims: Claims) -> bytes:
        """A ticket of this node. The key is read each time, because a restarted StateManager may
        have created another one.

        Raises:
            UnavailableError: the StateManager has created no key yet.
        """
        return read_ticket_key(self._key_file).mint(claims)

    async def close(self) -> None:
        """Stop waiting. A running migration ends with the process, and can be repeated."""
        tasks = [*self._migrations.values(), *self._hints]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _copy(self, move: _Move, sources: Sequence[str]) -> MoveReport:
        deployment, seq, ranks = move
        work = partial(
            migrate,
            sources,
            self._path,
            deployment=deployment,
            seq=seq,
            ticket=self.ticket(AGENT),
            network=self._network,
            ranks=ranks,
        )
        async with self._dropping:
            # An order from before this one drops nothing that arrives from now on.
            pass
        async with self._may_migrate:
            report = await asyncio.wrap_future(_on_own_thread(work))
        LOG.info(
            "migrated version %d of %s to this node: %d bytes in %.3f s",
            *(seq, deployment, report.bytes_moved, report.seconds),
        )
        return report

    def _end(self, move: _Move, task: asyncio.Task[MoveReport]) -> None:
        del self._migrations[move]
        # The caller may be gone, so the error is logged here.
        if not task.cancelled() and (error := task.exception()) is not None:
            LOG.warning("could not migrate version %d of %s: %s", move[1], move[0], error)

    async def _hint(self, command: PrefetchState) -> None:
        def hint() -> None:
            with closing(self._client()) as client:
                client.prefetch(
                    command.deployment, command.seq, command.next_use_s, command.sources
                )

        try:
            await asyncio.to_thread(hint)
        except PlexRLError as error:
            LOG.info("could not pass on a prefetch hint: %r", error)

    def _client(self) -> StateManagerClient:
        return StateManagerClient(
            self._path,
            deployment="",
            rank=0,
            world_size=1,
            ticket=self.ticket(AGENT),
            timeout_s=CALL_TIMEOUT_S,
        )


def _on_own_thread(work: Callable[[], MoveReport]) -> Future[MoveReport]:
    """Run `work` on a daemon thread, which blocks neither a thread pool nor the process's exit."""
    future: Future[MoveReport] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
