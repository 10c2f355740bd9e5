"""Requests to the engines of a rollout deployment; each replica of the model has one engine."""

import asyncio
import uuid
from typing import Any

from plexrl.errors import (
    ConflictError,
    InvalidRequestError,
    PlexRLError,
    UnavailableError,
    from_wire,
)
from plexrl.model.deployment_spec import deployment_spec_from_json
from plexrl.router.execution.executor import Executor
from plexrl.router.execution.worker_link import WorkerGoneError
from plexrl.worker.process.server.server import WorkerName

COMMAND_TIMEOUT_S = 20.0
STATS_TIMEOUT_S = 2.0
"""Short, because a worker that loads weights does not reply until it is done."""

Plain = dict[str, Any]


Engine = tuple[WorkerName, str]
"""The worker that leads a replica, and its address."""


def engines_of(view: Plain) -> list[Engine]:
    """The workers that lead a replica, from the scheduler's view of a deployment; empty if some
    worker has not started."""
    layout = deployment_spec_from_json(view["spec_json"]).layout
    addresses = [each["address"] for each in sorted(view["ranks"], key=lambda rank: rank["rank"])]
    if len(addresses) != layout.world_size or None in addresses:
        return []
    deployment, incarnation = view["deployment"], view["incarnation"]
    return [
        (WorkerName(deployment, rank, incarnation), addresses[rank]) for rank in layout.output_ranks
    ]


class Engines:
    """Sends requests to engines over the router's connections to workers."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    async def request(self, engine: Engine, request: str, timeout_s: float, **fields: Any) -> Plain:
        """Send one engine a request and return its reply.

        Raises:
            UnavailableError: no reply in time; `details["is_gone"]` is True if the worker has
                ended, False if it is busy.
            PlexRLError: the error that the worker raised.
        """
        name = (f"ask-{uuid.uuid4().hex}", 0)
        header = {"request": request, "ask": name[0], **fields}
        try:
            link = self._executor.link(*engine)
            async with asyncio.timeout(timeout_s):
                reply, _ = await link.run(name, header, ())
        except (TimeoutError, WorkerGoneError) as error:
            raise UnavailableError(
                f"the deployment's worker at {engine[1]} did not reply to {request!r}: it is "
                "loading weights or restarting; try again",
                retry_after_s=0.5,
                is_gone=isinstance(error, WorkerGoneError),
            ) from error
        if reply["reply"] == "failed":
            raise from_wire(reply["error"])
        found: Plain = reply["answer"]
        return found

    async def command(self, view: Plain, request: str, **fields: Any) -> list[Plain]:
        """Send every engine of a deployment a command; return the engines' states after it.

        Raises:
            InvalidRequestError: the deployment is not a rollout deployment.
            ConflictError: the deployment has no workers now, or no weights on its device.
            UnavailableError: an engine did not reply; the command may be repeated.
        """
        if view["kind"] != "rollout":
            raise InvalidRequestError(
                f"{view['deployment']!r} is a {view['kind']} deployment, which generates nothing: "
                f"{request} a rollout deployment"
            )
        engines = engines_of(view)
        if not engines:
            raise ConflictError(
                f"{view['deployment']!r} has no workers now ({view['state']}), so there is nothing "
                f"to {request}: see `plexrl explain`"
            )
        replies = [self.request(each, request, COMMAND_TIMEOUT_S, **fields) for each in engines]
        return list(await asyncio.gather(*replies))

    async def stats(self, view: Plain, request: str = "engine_stats") -> list[Plain]:
        """Statistics of a deployment's engines; with `engine_load` also their rows. An engine
        without weights on its device, or without a reply in time, is left out."""
        if view["kind"] != "rollout":
            return []
        requests = [self.request(each, request, STATS_TIMEOUT_S) for each in engines_of(view)]
        replies = await asyncio.gather(*requests, return_exceptions=True)
        found = []
        for reply in replies:
            if isinstance(reply, dict):
                found.append(reply)
            elif not isinstance(reply, PlexRLError):
                raise reply
        return found
