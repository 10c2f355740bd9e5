"""The rollout service: answers routers, and keeps all rollouts running."""

import asyncio
import logging
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import msgspec
import numpy as np

from plexrl.client.calls.transport import AsyncTransport
from plexrl.errors import (
    ConflictError,
    CorruptStateError,
    InvalidRequestError,
    NotFoundError,
    PlexRLError,
    QuotaExceededError,
    UnavailableError,
)
from plexrl.rollout.service.cluster_calls import ClusterCalls, OperatorAccess
from plexrl.rollout.service.config import FOLDER, SUFFIX, RolloutConfig
from plexrl.rollout.service.instances.switching import check_profile, check_sampling
from plexrl.rollout.service.journal.store import RolloutStore
from plexrl.rollout.service.live_rollout import LiveRollout
from plexrl.rollout.service.order import RolloutOrder
from plexrl.rollout.service.status import measured, status
from plexrl.rollout.trajectories.record import TrajectoryId, TrajectorySegment, group_of
from plexrl.wire.links.address import parse_address
from plexrl.wire.links.credentials import Credentials, Role
from plexrl.wire.links.dial import Link, Server, serve
from plexrl.wire.messages.rollout_views import (
    BatchView,
    ExchangeView,
    MeasuredRollout,
    RolloutBody,
    Rollouts,
    RolloutStatus,
)
from plexrl.wire.rpc import Peer
from plexrl.wire.tensors import Arrays, encode_body

LOG = logging.getLogger(__name__)

SILENCE_S_MAX = 120.0
"""How long a router may give no answer before the service says so in its log."""
PAGE_BYTES = 16 << 20
"""About the largest body of samples: it must fit into one message to a router. The caller asks for
the rest."""


class RolloutService:
    """All rollouts of a cluster."""

    def __init__(self, config: RolloutConfig) -> None:
        self._config = config
        self._folder = Path(config.data_dir) / FOLDER
        self._rollouts: dict[tuple[str, str], LiveRollout] = {}
        self._unreadable: dict[tuple[str, str], PlexRLError] = {}
        """Rollouts whose store cannot be read, and why."""
        self._creating = asyncio.Lock()
        """Held while a rollout is made, or made again."""
        self._tasks: asyncio.TaskGroup | None = None
        self._running: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._peers: set[Peer] = set()
        access = OperatorAccess(config)
        self._transport = AsyncTransport(
            *(config.routers, access.key, SILENCE_S_MAX, config.ca or None, access),
            environment={},  # routers are reached directly, as all parts reach each other
        )
        self._handlers = {
            "create": self._create,
            "exchange": self._exchange,
            "batch": self._batch,
            "status": self._status,
            "list": self._list,
            "profile": self._profile,
        }

    async def open(self) -> list[Server]:
        """Read the stored rollouts, and listen.

        Raises:
            OSError: an address cannot be listened on.
        """
        for path in sorted(self._folder.glob(f"*/*{SUFFIX}")):
            try:
                self._read(path)
            except PlexRLError as error:
                LOG.error("%s", error)
                key = unquote(path.parent.name), path.name.removesuffix(SUFFIX)
                self._unreadable[key] = error
        config = self._config
        credentials = None if config.tls is None else Credentials(config.tls)
        return [
            await serve(parse_address(each), credentials, self._on_link, roles=(Role.ROUTER,))
            for each in config.listen
        ]

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Run the rollouts, each as a task of `tasks`."""
        self._tasks = tasks
        for rollout in self._rollouts.values():
            self._run(rollout)

    async def close(self) -> None:
        """End the tasks; close the connections to routers, and the stores."""
        for peer in self._peers:
            peer.close()
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        await self._transport.close()
        for rollout in self._rollouts.values():
            await rollout.writer.idle()
            # Another version may decide in another way on the events, which it need not replay.
            try:
                rollout.store_state()
            except sqlite3.Error as error:
                LOG.error("the state of %s is not stored: %s", rollout.store.path, error)
            rollout.store.close()

    async def _on_link(self, link: Link) -> None:
        peer = Peer(link.reader, link.writer, self._handlers)
        self._peers.add(peer)
        try:
            await peer.run()
        finally:
            self._peers.discard(peer)

    def _read(self, path: Path) -> None:
        """Continue the rollout of a store. Raises StorageError: it cannot be read."""
        store = RolloutStore(path)
        try:
            order = store.order()
            if order is None:
                store.delete()  # its creation was never answered
            else:
                self._add(order, store)
        except (msgspec.MsgspecError, sqlite3.Error) as error:
            raise CorruptStateError(
                f"{path} cannot be read: {error}: restore the file from a backup, or delete it to "
                "end its rollout"
            ) from error

    def _add(self, order: RolloutOrder, store: RolloutStore) -> LiveRollout:
        calls = ClusterCalls(self._transport, order.job)
        rollout = LiveRollout(order, store, calls, self._config)
        self._rollouts[order.job, order.name] = rollout
        if self._tasks is not None:
            self._run(rollout)
        return rollout

    def _run(self, rollout: LiveRollout) -> None:
        assert self._tasks is not None
        key = rollout.order.job, rollout.order.name
        self._running[key] = self._tasks.create_task(self._keep(rollout))

    async def _keep(self, rollout: LiveRollout) -> None:
        """Run a rollout, and delete it once its job has ended."""
        await rollout.run()
        if rollout.failure is not None:
            await rollout.job_end()
        await rollout.writer.idle()
        # No await from here on: requests must not find a rollout whose store is closed.
        key = rollout.order.job, rollout.order.name
        del self._rollouts[key], self._running[key]
        rollout.store.delete()

    def _find(self, params: Mapping[str, Any]) -> LiveRollout:
        key = params["job"], params["name"]
        found = self._rollouts.get(key)
        if found is not None:
            return found
        if (error := self._unreadable.get(key)) is not None:
            raise error
        raise NotFoundError(
            f"job {params['job']!r} has no asynchronous rollout {params['name']!r}: create it"
        )

    async def _create(self, _: Peer, params: Mapping[str, Any]) -> RolloutStatus:
        try:
            order = msgspec.convert(params["order"], RolloutOrder)
        except msgspec.ValidationError as error:
            raise InvalidRequestError(f"the rollout is not valid: {error}") from error
        async with self._creating:
            found = await self._make_rollout(order)
        await found.wait_for(lambda: found.is_joined, float(params["wait_s"]))
        return await _durable_status(found)

    async def _make_rollout(self, order: RolloutOrder) -> LiveRollout:
        """The rollout of an order: a new one, the existing one, or that one after a failure."""
        if (order.job, order.name) in self._unreadable:
            raise self._unreadable[order.job, order.name]
        found = self._rollouts.get((order.job, order.name))
        if found is None:
            self._check_room(order)
            await self._check_profile(order)
            path = self._folder / quote(order.job, safe="") / f"{order.name}{SUFFIX}"
            store = RolloutStore(path)
            store.begin(order)
            return self._add(order, store)
        changed = found.order.with_policy(order)
        if changed is None:
            raise ConflictError(
                f"job {order.job!r} has a rollout {order.name!r} with other settings: "
                f"{found.order.differences(order)}: use another name, or the same settings; only "
                "the policy may change"
            )
        if changed != found.order:
            await self._check_profile(changed)
        if has_failed := found.failure is not None:
            assert self._tasks is not None
            # The link may end and cancel this handler, but not the restart.
            found = await asyncio.shield(self._tasks.create_task(self._again(found)))
        if has_failed or changed != found.order:
            found.change_policy(changed)
        return found

    async def _check_profile(self, order: RolloutOrder) -> None:
        calls = ClusterCalls(self._transport, order.job)
        await check_profile(order.adaptive_tp, calls, order.instances)
        await check_sampling(order.sampling, calls, order.instances)

    def _check_room(self, order: RolloutOrder) -> None:
        count = sum(job == order.job for job, _ in (*self._rollouts, *self._unreadable))
        if count >= self._config.job_rollouts_max:
            raise QuotaExceededError(
                f"job {order.job!r} has {count} asynchronous rollouts, as many as job_rollouts_max "
                "of the service allows: use one of them, or another job"
            )

    async def _again(self, failed: LiveRollout) -> LiveRollout:
        """Continue a rollout that failed: its controller has asked for it again."""
        key = failed.order.job, failed.order.name
        if (task := self._running.get(key)) is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await failed.writer.idle()
        # No await from here on: requests must not find a rollout whose store is closed.
        if self._rollouts.get(key) is not failed:
            raise UnavailableError("the rollout has ended or was started again: retry")
        failed.store.close()
        del self._rollouts[key], self._running[key]
        try:
            self._read(failed.store.path)
        except PlexRLError as error:
            self._unreadable[key] = error
            raise
        return self._rollouts[key]

    async def _status(self, _: Peer, params: Mapping[str, Any]) -> RolloutStatus:
        return await _durable_status(self._find(params))

    async def _list(self, _: Peer, params: Mapping[str, Any]) -> Rollouts:
        job = params.get("job")
        found = [rollout for rollout in self._rollouts.values() if job in (None, rollout.order.job)]
        return {"rollouts": [await _durable_status(each) for each in found]}

    async def _profile(self, _: Peer, params: Mapping[str, Any]) -> MeasuredRollout:
        return measured(self._find(params))

    async def _exchange(self, _: Peer, params: Mapping[str, Any]) -> RolloutBody:
        rollout, body = self._find(params), params["body"]
        rollout.check()
        for trajectory, event, reward, reason in body["rewards"]:
            rollout.reward(trajectory, event, reward, reason)
        for group, tokens in enumerate(body["prompts"], body["first"]):
            rollout.add_prompt(group, np.array(tokens, dtype=np.int32))
        if body["ended"] and rollout.progress.next_group == body["first"] + len(body["prompts"]):
            rollout.end_prompts()
        after = int(body["after"])
        unrewarded = rollout.progress.unrewarded

        def news() -> list[TrajectoryId]:
            return [each for each, seq in unrewarded.items() if seq > after]

        def is_done() -> bool:
            return bool(rollout.core.groups_wanted) or any(s > after for s in unrewarded.values())

        await rollout.wait_for(is_done, float(params["wait_s"]))
        found = {new: unrewarded[new] for new in news()}
        records = [rollout.core.trajectories.get(each) for each in found]
        segments = [() if record is None else tuple(record.segments) for record in records]
        about = status(rollout)

        def fields(seen: Sequence[int], read: int) -> ExchangeView:
            # In the order of events: the page holds all up to the last one that was read.
            events = list(found.values())
            return {
                **about,
                "cursor": max([after, *events[:read]]),
                "events": [events[each] for each in seen],
            }

        return {"body": await _samples(rollout, list(found), segments, fields)}

    async def _batch(self, _: Peer, params: Mapping[str, Any]) -> RolloutBody:
        rollout, version = self._find(params), int(params["version"])
        rollout.check()
        first, trainer_step = int(params.get("first", 0)), int(params["trainer_step"])
        seen: frozenset[int] | None = None
        if params.get("seen") is not None:
            seen = frozenset(params["seen"])
        rollout.check_batch(version, trainer_step)
        if version not in rollout.steps:
            # Before the controller's next operations: it has no batch yet.
            operation = rollout.store.operation(rollout.order, f"v{version}")
            await rollout.calls.push(rollout.order.source, operation)
            if self._find(params) is not rollout:
                raise UnavailableError("the rollout was started again: retry")
            rollout.check()
        rollout.request_batch(version, trainer_step)
        rows = rollout.order.prompts * rollout.order.samples

        def ready() -> bool:
            if rollout.is_complete(version):
                return True
            complete = rollout.core.manager.buffers.buffer(version).occupied
            return seen is not None and len(complete) * rollout.order.samples > len(seen)

        clock = asyncio.get_running_loop().time
        rollout.stages.note(clock(), trains=ready())
        await rollout.wait_for(ready, float(params["wait_s"]))
        rollout.stages.note(clock(), trains=ready())
        if not ready():
            return {"body": None}
        complete = rollout.complete_samples(version)
        page = complete[first:]
        if seen is not None:
            page = [sample for sample in complete if sample.trajectory not in seen]
            if len(complete) - len(page) < len(seen):
                raise ConflictError(
                    f"batch {version} lacks samples that were taken, since the policy was changed: "
                    "drop the gradients with zero_grad, and take the batch again"
                )
        if not page:
            raise InvalidRequestError(f"batch {version} has {rows} samples, and all were taken")

        def fields(found: Sequence[int], read: int) -> BatchView:
            if len(found) < read:
                raise ConflictError(f"batch {version} was trained: request the next one")
            return {
                "version": version,
                "rows": rows,
                "rewards": [page[place].reward for place in found],
                "versions": [page[place].version for place in found],
            }

        ids = [sample.trajectory for sample in page]
        return {"body": await _samples(rollout, ids, [sample.segments for sample in page], fields)}


async def _durable_status(rollout: LiveRollout) -> RolloutStatus:
    found = status(rollout)
    await rollout.writer.settled()
    return found


async def _samples(
    rollout: LiveRollout,
    ids: Sequence[TrajectoryId],
    segments: Sequence[Sequence[TrajectorySegment]],
    fields: Callable[[Sequence[int], int], ExchangeView | BatchView],
) -> bytes:
    """A body with trajectories: `prompts` and `tokens` packed, with lengths; for each one its
    group, its `segments` (count of tokens, version, trainer's step) and why it ended (`finish`).

    It holds the first ones of `ids`, about `PAGE_BYTES` of them at most. `fields` gets the indices
    of those that it holds, and how many it has looked for, and returns the other parameters."""
    per_group = rollout.progress.group_size
    wanted = [(group_of(id_, per_group), id_) for id_ in ids]
    steps = dict(rollout.steps)
    # What the caller knows of them may not be durable yet.
    await rollout.writer.settled()

    def read() -> bytes:
        rows = rollout.store.read(wanted, PAGE_BYTES)
        found = [(index, *row) for index, row in enumerate(rows) if row is not None]
        spans = [
            [[s.tokens, s.policy_version, steps[s.policy_version]] for s in segments[index]]
            for index, _, _ in found
        ]
        none = np.empty(0)
        arrays: Arrays = {
            "trajectories": np.array([ids[index] for index, _, _ in found], dtype=np.int64),
            "groups": np.array([wanted[index][0] for index, _, _ in found], dtype=np.int64),
            "prompts": np.concatenate([*(p for _, p, _ in found), none]).astype(np.int32),
            "prompt_lengths": np.array([len(p) for _, p, _ in found], dtype=np.int32),
            "tokens": np.concatenate([*(r.tokens for _, _, r in found), none]).astype(np.int32),
            "lengths": np.array([len(r.tokens) for _, _, r in found], dtype=np.int32),
            "logprobs": np.concatenate([*(r.logprobs for _, _, r in found), none]).astype(
                np.float32
            ),
        }
        drawn_by = [r.sampling_logprobs for _, _, r in found if r.sampling_logprobs is not None]
        if drawn_by:
            # All samples of a rollout have them, or none has.
            arrays["sampling_logprobs"] = np.concatenate(drawn_by).astype(np.float32)
        params = {
            **fields([index for index, _, _ in found], len(rows)),
            "segments": spans,
            "finish": [r.finish for _, _, r in found],
        }
        return encode_body(params, arrays)

    return await asyncio.to_thread(read)
