"""The rollout service: answers routers, and keeps all rollouts running."""

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import numpy as np

from plexrl.client.calls.transport import AsyncTransport
from plexrl.errors import ConflictError, InvalidRequestError, NotFoundError
from plexrl.rollout.service.cluster_calls import ClusterCalls
from plexrl.rollout.service.config import FOLDER, SUFFIX, RolloutConfig
from plexrl.rollout.service.live_rollout import LiveRollout
from plexrl.rollout.service.order import RolloutOrder
from plexrl.rollout.service.store import RolloutStore
from plexrl.rollout.trajectories.record import SampleGroupId, Segment, TrajectoryId
from plexrl.wire.links.address import parse_address
from plexrl.wire.links.credentials import Credentials, Role
from plexrl.wire.links.dial import Link, Server, serve
from plexrl.wire.rpc import Peer
from plexrl.wire.tensors import Arrays, encode_body

LOG = logging.getLogger(__name__)

SILENCE_S_MAX = 120.0
"""How long a router may give no answer before the service says so in its log."""
Plain = dict[str, Any]


class RolloutService:
    """All rollouts of a cluster."""

    def __init__(self, config: RolloutConfig) -> None:
        self._config = config
        self._folder = Path(config.data_dir) / FOLDER
        self._rollouts: dict[tuple[str, str], LiveRollout] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._running: set[asyncio.Task[None]] = set()
        self._peers: set[Peer] = set()
        self._transport = AsyncTransport(
            config.routers, config.operator_key(), SILENCE_S_MAX, config.ca or None
        )
        self._handlers = {
            "create": self._create,
            "exchange": self._exchange,
            "batch": self._batch,
            "status": self._status,
        }

    async def open(self) -> list[Server]:
        """Read the stored rollouts, and listen.

        Raises:
            StorageError: a store cannot be read.
            OSError: an address cannot be listened on.
        """
        for path in sorted(self._folder.glob(f"*/*{SUFFIX}")):
            store = RolloutStore(path)
            order = store.order()
            if order is None:
                store.delete()  # its creation was never answered
            else:
                self._add(order, store)
        config = self._config
        credentials = None if config.tls is None else Credentials(config.tls)
        return [
            await serve(parse_address(each), credentials, self._on_link, roles=(Role.ROUTER,))
            for each in config.listen
        ]

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Run the rollouts, each as a task of `tasks`."""
        self._tasks = tasks
        for each in self._rollouts.values():
            self._run(each)

    async def close(self) -> None:
        """End the tasks; close the connections to routers, and the stores."""
        for peer in self._peers:
            peer.close()
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        await self._transport.close()
        for each in self._rollouts.values():
            each.store.close()

    async def _on_link(self, link: Link) -> None:
        peer = Peer(link.reader, link.writer, self._handlers)
        self._peers.add(peer)
        try:
            await peer.run()
        finally:
            self._peers.discard(peer)

    def _add(self, order: RolloutOrder, store: RolloutStore) -> LiveRollout:
        calls = ClusterCalls(self._transport, order.job)
        rollout = LiveRollout(order, store, calls, self._config.cycle_s)
        self._rollouts[order.job, order.name] = rollout
        if self._tasks is not None:
            self._run(rollout)
        return rollout

    def _run(self, rollout: LiveRollout) -> None:
        assert self._tasks is not None
        task = self._tasks.create_task(self._keep(rollout))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _keep(self, rollout: LiveRollout) -> None:
        """Run a rollout, and delete it once its job has ended."""
        await rollout.run()
        if rollout.failure is not None:
            await rollout.job_end()
        del self._rollouts[rollout.order.job, rollout.order.name]
        rollout.store.delete()

    def _find(self, params: Plain) -> LiveRollout:
        found = self._rollouts.get((params["job"], params["name"]))
        if found is None:
            raise NotFoundError(
                f"job {params['job']!r} has no asynchronous rollout {params['name']!r}: create it"
            )
        found.check()
        return found

    async def _create(self, _: Peer, params: Plain) -> Plain:
        try:
            order = msgspec.convert(params["order"], RolloutOrder)
        except msgspec.ValidationError as error:
            raise InvalidRequestError(f"the rollout is not valid: {error}") from error
        found = self._rollouts.get((order.job, order.name))
        if found is None:
            path = self._folder / quote(order.job, safe="") / f"{order.name}{SUFFIX}"
            store = RolloutStore(path)
            store.begin(order)
            found = self._add(order, store)
        elif found.order != order:
            raise ConflictError(
                f"job {order.job!r} has a rollout {order.name!r} with other settings: use another "
                "name, or the same settings"
            )
        await found.wait_for(lambda: found.is_joined, float(params["wait_s"]))
        return _summary(found)

    async def _status(self, _: Peer, params: Plain) -> Plain:
        return _summary(self._find(params))

    async def _exchange(self, _: Peer, params: Plain) -> Plain:
        rollout, body = self._find(params), params["body"]
        for trajectory, reward, reason in body["rewards"]:
            rollout.reward(trajectory, reward, reason)
        for group, tokens in enumerate(body["prompts"], body["first"]):
            rollout.add_prompt(group, np.array(tokens, dtype=np.int32))
        after = int(body["after"])

        def news() -> list[TrajectoryId]:
            return [each for each, seq in rollout.unrewarded.items() if seq > after]

        await rollout.wait_for(lambda: bool(news() or _wanted(rollout)), float(params["wait_s"]))
        found = news()
        cursor = max([after, *rollout.unrewarded.values()])
        records = [rollout.core.trajectories.get(each) for each in found]
        segments = [() if each is None else tuple(each.segments) for each in records]
        params = {**_summary(rollout), "cursor": cursor}
        return {"body": _samples(rollout, found, segments, params)}

    async def _batch(self, _: Peer, params: Plain) -> Plain:
        rollout, version = self._find(params), int(params["version"])
        rollout.request_batch(version, int(params["trainer_step"]))

        def ready() -> bool:
            return rollout.batch is not None and rollout.batch.version == version

        await rollout.wait_for(ready, float(params["wait_s"]))
        if not ready() or rollout.batch is None:
            return {"body": None}
        trained = rollout.batch.batch
        params = {
            "version": version,
            "rewards": [each.reward for each in trained],
            "versions": [each.version for each in trained],
        }
        body = _samples(
            rollout,
            [each.trajectory for each in trained],
            [each.segments for each in trained],
            params,
        )
        return {"body": body}


def _wanted(rollout: LiveRollout) -> int:
    return rollout.core.groups_wanted


def _summary(rollout: LiveRollout) -> Plain:
    core = rollout.core
    return {
        "joined": rollout.is_joined,
        "groups_wanted": core.groups_wanted,
        "next_group": rollout.next_group,
        "next_batch": core.manager.buffers.next_version,
        "newest_version": core.newest_version,
        "dropped": rollout.dropped,
        "dropped_reason": rollout.dropped_reason,
        "instances": {
            name: {"version": work.version, "trajectories": len(work.held)}
            for name, work in rollout.instances.work.items()
        },
    }


def _samples(
    rollout: LiveRollout,
    ids: Sequence[TrajectoryId],
    segments: Sequence[Sequence[Segment]],
    params: Plain,
) -> bytes:
    """A body with trajectories: `prompts` and `tokens` packed, with lengths; for each one its
    `segments` (count of tokens, version, trainer's step) and why it ended (`finish`)."""
    per_group = rollout.order.settings().staleness.samples
    prompts = [rollout.store.prompt(SampleGroupId(each // per_group)) for each in ids]
    responses = [rollout.store.response(each) for each in ids]
    spans = [
        [[s.tokens, s.policy_version, rollout.steps[s.policy_version]] for s in each]
        for each in segments
    ]
    none = np.empty(0)
    arrays: Arrays = {
        "trajectories": np.array(ids, dtype=np.int64),
        "prompts": np.concatenate([*prompts, none]).astype(np.int32),
        "prompt_lengths": np.array([len(each) for each in prompts], dtype=np.int32),
        "tokens": np.concatenate([*(each.tokens for each in responses), none]).astype(np.int32),
        "lengths": np.array([len(each.tokens) for each in responses], dtype=np.int32),
        "logprobs": np.concatenate([*(each.logprobs for each in responses), none]).astype(
            np.float32
        ),
    }
    finish = [each.finish for each in responses]
    return encode_body({**params, "segments": spans, "finish": finish}, arrays)
