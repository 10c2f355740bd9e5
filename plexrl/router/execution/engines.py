"""Questions to the engines of a rollout deployment, one engine a replica of the model."""

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

ORDER_TIMEOUT_S = 20.0
STATS_TIMEOUT_S = 2.0
"""A worker that loads weights answers nobody meanwhile."""

Plain = dict[str, Any]


def engine_addresses(view: Plain) -> list[str]:
    """The workers that lead a replica each, of a deployment as the scheduler shows it; none where
    some worker is not there."""
    layout = deployment_spec_from_json(view["spec_json"]).layout
    addresses = [each["address"] for each in sorted(view["ranks"], key=lambda rank: rank["rank"])]
    if len(addresses) != layout.world_size or None in addresses:
        return []
    return [addresses[rank] for rank in layout.output_ranks]


class Engines:
    """Of all rollout deployments, by way of the router's own connections to workers."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    async def ask(self, address: str, request: str, timeout_s: float, **fields: Any) -> Plain:
        """One engine's answer.

        Raises:
            UnavailableError: there is none in time; `details["is_gone"]` is whether the worker is
                gone, rather than busy.
            PlexRLError: what the worker raised.
        """
        name = (f"ask-{uuid.uuid4().hex}", 0)
        header = {"request": request, "ask": name[0], **fields}
        link = self._executor.link(address)
        try:
            async with asyncio.timeout(timeout_s):
                answer, _ = await link.run(name, header, ())
        except (TimeoutError, WorkerGoneError) as error:
            raise UnavailableError(
                f"the deployment's worker at {address} did not answer {request!r}: it is busy "
                "loading weights, or being restarted; ask again",
                retry_after_s=0.5,
                is_gone=isinstance(error, WorkerGoneError),
            ) from error
        if answer["reply"] == "failed":
            raise from_wire(answer["error"])
        found: Plain = answer["answer"]
        return found

    async def order(self, view: Plain, request: str, **fields: Any) -> list[Plain]:
        """Have every engine of a deployment do something; how each stands then.

        Raises:
            InvalidRequestError: it is no rollout deployment.
            ConflictError: it has no workers now, or no weights on its device.
            UnavailableError: an engine did not answer; the order may be given again.
        """
        if view["kind"] != "rollout":
            raise InvalidRequestError(
                f"{view['deployment']!r} is a {view['kind']} deployment: it generates nothing"
            )
        addresses = engine_addresses(view)
        if not addresses:
            raise ConflictError(
                f"{view['deployment']!r} has no workers now ({view['state']}), so nothing of it "
                f"runs that one could {request}: see `plexrl explain`"
            )
        asked = [self.ask(address, request, ORDER_TIMEOUT_S, **fields) for address in addresses]
        return list(await asyncio.gather(*asked))

    async def stats(self, view: Plain) -> list[Plain]:
        """How the engines of a deployment stand; nothing of one that has no weights now or does
        not answer."""
        if view["kind"] != "rollout":
            return []
        asked = [
            self.ask(address, "engine_stats", STATS_TIMEOUT_S) for address in engine_addresses(view)
        ]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        found = []
        for answer in answers:
            if isinstance(answer, dict):
                found.append(answer)
            elif not isinstance(answer, PlexRLError):
                raise answer
        return found
