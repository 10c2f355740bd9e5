"""Requests to the engines of a rollout deployment; each replica of the model has one engine."""

import asyncio
import uuid
from typing import Any

import msgspec

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
from plexrl.wire.messages import (
    AnyEngineRequest,
    EngineLoad,
    EngineStatistics,
    Failed,
    Finished,
    Pause,
    Resume,
    SetTp,
    WorkerName,
    frame_header,
    read_reply,
)
from plexrl.wire.messages.views import DeploymentView
from plexrl.wire.messages.workers import EngineLoadView, EngineView

COMMAND_TIMEOUT_S = 20.0
STATS_TIMEOUT_S = 2.0
"""Short, because a worker that loads weights does not reply until it is done."""


Engine = tuple[WorkerName, str]
"""The worker that leads a replica, and its address."""


def name_of(request: AnyEngineRequest) -> str:
    """The name of a request on the wire and in messages."""
    return str(request.__struct_config__.tag)


def engines_of(view: DeploymentView) -> list[Engine]:
    """The workers that lead a replica, from the scheduler's view of a deployment; empty if some
    worker has not started."""
    layout = deployment_spec_from_json(view["spec_json"]).layout
    ranks = sorted(view["ranks"], key=lambda rank: rank["rank"])
    addresses = [rank["address"] for rank in ranks if rank["address"] is not None]
    if len(addresses) != layout.world_size:
        return []
    deployment, incarnation = view["deployment"], view["incarnation"]
    return [
        (WorkerName(deployment, rank, incarnation), addresses[rank]) for rank in layout.output_ranks
    ]


class Engines:
    """Sends requests to engines over the router's connections to workers."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    async def request(self, engine: Engine, request: AnyEngineRequest, timeout_s: float) -> Any:
        """Send one engine a request under a new `ask` and return its answer, of the
        type that is for the request.

        Raises:
            UnavailableError: no reply in time; `details["is_gone"]` is True if the worker has
                ended, False if it is busy.
            PlexRLError: the error that the worker raised.
        """
        ask = f"ask-{uuid.uuid4().hex}"
        header = frame_header(msgspec.structs.replace(request, ask=ask))
        try:
            link = self._executor.link(*engine)
            async with asyncio.timeout(timeout_s):
                answered, _ = await link.run((ask, 0), header, ())
        except (TimeoutError, WorkerGoneError) as error:
            raise UnavailableError(
                f"the deployment's worker at {engine[1]} did not reply to {name_of(request)!r}: it "
                "is loading weights or restarting; try again",
                retry_after_s=0.5,
                is_gone=isinstance(error, WorkerGoneError),
            ) from error
        reply = read_reply(answered)
        if isinstance(reply, Failed):
            raise from_wire(reply.error)
        assert not isinstance(reply, Finished), "an engine request is no run"
        return reply.answer

    async def command(
        self, view: DeploymentView, request: Pause | Resume | SetTp
    ) -> list[EngineView]:
        """Send every engine of a deployment a command; return the engines' states after it.

        Raises:
            InvalidRequestError: the deployment is not a rollout deployment.
            ConflictError: the deployment has no workers now, or no weights on its device.
            UnavailableError: an engine did not reply; the command may be repeated.
        """
        if view["kind"] != "rollout":
            raise InvalidRequestError(
                f"{view['deployment']!r} is a {view['kind']} deployment, which generates nothing: "
                f"{name_of(request)} a rollout deployment"
            )
        engines = engines_of(view)
        if not engines:
            raise ConflictError(
                f"{view['deployment']!r} has no workers now ({view['state']}), so there is nothing "
                f"to {name_of(request)}: see `plexrl explain`"
            )
        replies = [self.request(engine, request, COMMAND_TIMEOUT_S) for engine in engines]
        return list(await asyncio.gather(*replies))

    async def stats(self, view: DeploymentView) -> list[EngineView]:
        """Statistics of a deployment's engines. An engine without weights on its device, or without
        a reply in time, is left out."""
        return await self._replies(view, EngineStatistics())

    async def loads(self, view: DeploymentView) -> list[EngineLoadView]:
        """As `stats`, also the lengths of all unfinished rows."""
        return await self._replies(view, EngineLoad())

    async def _replies(
        self, view: DeploymentView, request: EngineStatistics | EngineLoad
    ) -> list[Any]:
        if view["kind"] != "rollout":
            return []
        requests = [self.request(engine, request, STATS_TIMEOUT_S) for engine in engines_of(view)]
        replies = await asyncio.gather(*requests, return_exceptions=True)
        found = []
        for reply in replies:
            if not isinstance(reply, BaseException):
                found.append(reply)
            elif not isinstance(reply, PlexRLError):
                raise reply
        return found
