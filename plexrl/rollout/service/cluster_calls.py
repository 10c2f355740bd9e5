"""Operations that the rollout service submits through a router, for one job.

Operation ids are functions of the rollout's history. So a call that is repeated after a crash finds
the operation of the first one, and its result.
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

import httpx
import numpy as np

from plexrl.client.calls import requests
from plexrl.client.calls.requests import Submission
from plexrl.client.calls.transport import AsyncTransport, Call, deployment_path
from plexrl.client.data import results
from plexrl.client.data.results import Decoder, Sample, SyncReport
from plexrl.client.futures.futures import POLL_S, poll_call
from plexrl.client.futures.generations import RETRIABLE, ended_sample, stream_call
from plexrl.errors import (
    ConnectionLostError,
    NotFoundError,
    PlexRLError,
    UnknownOperationError,
    from_wire,
)
from plexrl.model.parallelism import Parallelism
from plexrl.rollout.service.config import RolloutConfig
from plexrl.wire.messages.views import DeploymentStatus, EngineLoads
from plexrl.wire.messages.workers import EngineLoadView
from plexrl.wire.operations import (
    OperationKind,
    OperationState,
    SamplingParams,
    SyncWeightsParams,
)
from plexrl.wire.tensors import decode_body

LOG = logging.getLogger(__name__)

STATS_TIMEOUT_S = 5.0
ARRIVAL_S = 0.05
"""Interval at which it is asked whether a version has arrived."""
RETRY_S = 0.2
"""Pause before rows are read again after a lost connection."""


class OperatorAccess(httpx.Auth):
    """The operator's key, as its file has it. It is read again when a router refuses the former
    one, because the operator may rotate it."""

    def __init__(self, config: RolloutConfig) -> None:
        """Raises `InvalidRequestError` as `RolloutConfig.operator_key`."""
        self._config = config
        self.key = config.operator_key()

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        """Send a request, and again if the key has changed since."""
        used = self.key
        request.headers["Authorization"] = f"Bearer {used}"
        answer = yield request
        if answer.status_code != HTTPStatus.UNAUTHORIZED:
            return
        self.key = self._config.operator_key()
        if self.key != used:
            request.headers["Authorization"] = f"Bearer {self.key}"
            yield request


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRequest:
    """One row to generate."""

    tokens: Sequence[int]
    """Prompt and tokens drawn so far."""
    max_tokens: int
    """Most tokens to draw now."""
    number: int
    """Number of its random stream."""
    drawn: int
    """Tokens drawn so far."""


class ClusterCalls:
    """Calls about one job."""

    def __init__(self, transport: AsyncTransport, job: str) -> None:
        self._transport = transport
        self._job = job

    async def generate(
        self, deployment: str, rows: Sequence[RowRequest], sampling: SamplingParams, operation: str
    ) -> None:
        """Begin to draw rows, one sample each.

        Raises:
            PlexRLError: it was refused.
        """
        settings = {
            "max_tokens": [row.max_tokens for row in rows],
            "first_sample": [row.number for row in rows],
            "drawn_tokens": [row.drawn for row in rows],
        }
        submission = requests.generate(
            f"{self._job}/{deployment}",
            [row.tokens for row in rows],
            1,
            sampling,
            stream="rows",
            settings={name: np.array(values, np.int64) for name, values in settings.items()},
        )
        await self._submit(submission, operation)

    async def is_known(self, operation: str) -> bool:
        """Whether the cluster has an operation."""
        try:
            await self._request(poll_call(operation, 0.0))
        except UnknownOperationError:
            return False
        except PlexRLError as error:
            # Its own error, which the reader of its rows meets, too.
            LOG.info("%s has failed: %s", operation, error)
        return True

    async def rows(self, operation: str) -> AsyncIterator[list[tuple[int, Sample]] | None]:
        """The rows of a `generate`, in the order in which they end. None: it runs again, from its
        start, and rows may come again.

        Raises:
            PlexRLError: the generation failed.
        """
        cursor, is_done = "", False
        while not is_done:
            try:
                async for line in self._transport.lines(stream_call(operation, cursor)):
                    event = json.loads(line) if line else {}
                    if "error" in event:
                        is_done = True
                        raise from_wire(event["error"])
                    if "restart" in event:
                        yield None
                    elif "rows" in event:
                        cursor = event["cursor"]
                        yield [(row["sample"], _sample(row)) for row in event["rows"]]
                    is_done = "done" in event
            except PlexRLError as error:
                if is_done or error.status not in RETRIABLE:
                    raise
                LOG.info("the rows of %s are read again (%s)", operation, error)
                await asyncio.sleep(RETRY_S)

    async def stop_rows(self, operation: str, rows: Sequence[int]) -> bool:
        """Stop rows of a `generate`. Rows that have ended stay as they are. True: the operation
        does not run now, and these rows will draw nothing.

        Raises:
            NotFoundError: there is no such operation.
        """
        path = f"/v1/operations/{quote(operation, safe='')}/stop-rows"
        call = Call(method="POST", path=path, json={"rows": list(rows)})
        return bool((await self._request(call)).json()["state"] == OperationState.PENDING)

    async def pull(
        self, deployment: str, source: str, operation: str, *, published: bool = False
    ) -> SyncReport:
        """Set a deployment's weights to those of `source`. `published`: the newest ones that it has
        published, without waiting for the trainer.

        Raises:
            PlexRLError: the sync failed.
        """
        decoder = await self.begin_pull(deployment, source, operation, published=published)
        found: SyncReport = await self._result(decoder, operation)
        return found

    async def begin_pull(
        self, deployment: str, source: str, operation: str, *, published: bool = False
    ) -> Decoder:
        """Begin a `pull`; returns how its result is read. Raises as that."""
        params = SyncWeightsParams(
            source=f"{self._job}/{source}", published=published, ahead=published
        )
        name = f"{self._job}/{deployment}"
        submission = requests.submission(
            name, OperationKind.SYNC_WEIGHTS, params, results.decode_plain
        )
        await self._submit(submission, operation)
        return submission.decoder

    async def arrived(self, deployment: str, operation: str) -> None:
        """Return once the version that a pull needs is on the deployment's nodes, or it has ended.

        Raises:
            PlexRLError: the pull failed.
        """
        while True:
            engines = await self.engines(deployment)
            if engines and all(engine["arrived"] == operation for engine in engines):
                return
            response = await self._request(poll_call(operation, ARRIVAL_S))
            if response.status_code != HTTPStatus.ACCEPTED:
                return

    async def push(self, source: str, operation: str) -> None:
        """Have a trainer publish its weights; returns once the operation is accepted.

        Raises:
            PlexRLError: it was refused.
        """
        await self._submit(requests.publish(f"{self._job}/{source}"), operation)

    async def pushed(self, operation: str) -> None:
        """Return once a publish has ended; one that is unknown ended long ago.

        Raises:
            PlexRLError: it failed.
        """
        with suppress(NotFoundError):
            await self._result(results.decode_plain, operation)

    async def cancel(self, operation: str) -> None:
        """End a generation early; one that has ended stays as it is."""
        path = f"/v1/operations/{quote(operation, safe='')}"
        await self._request(Call(method="DELETE", path=path))

    async def engines(self, deployment: str) -> list[EngineLoadView]:
        """Load of a deployment's engines; empty: they give none now."""
        path = f"{deployment_path(f'{self._job}/{deployment}')}/engines"
        try:
            async with asyncio.timeout(STATS_TIMEOUT_S):
                response = await self._transport.request(Call(method="GET", path=path))
        except (TimeoutError, PlexRLError):
            return []
        found: EngineLoads = response.json()
        return found["engines"]

    async def deployment(self, name: str) -> DeploymentStatus:
        """A deployment's status.

        Raises:
            UnknownDeploymentError: there is none.
            PlexRLError: its status cannot be read now.
        """
        call = Call(method="GET", path=deployment_path(f"{self._job}/{name}"))
        status: DeploymentStatus = (await self._transport.request(call)).json()
        return status

    async def ensure_copy(self, like: str, name: str) -> None:
        """Create a deployment with the settings of another one, unless it exists.

        Raises:
            PlexRLError: the cluster refuses it, or the name is that of another deployment.
        """
        path = f"{deployment_path(f'{self._job}/{like}')}/copies"
        await self._request(Call(method="POST", path=path, json={"name": name}))

    async def end(self, name: str) -> None:
        """End a deployment; one that has ended stays as it is.

        Raises:
            PlexRLError: it does not end.
        """
        path = deployment_path(f"{self._job}/{name}")
        await self._request(Call(method="DELETE", path=path))

    async def set_parallelism(self, name: str, layout: Parallelism) -> None:
        """Divide a deployment's GPUs in another way.

        Raises:
            PlexRLError: it cannot have the layout, or does not get it now.
        """
        path = f"{deployment_path(f'{self._job}/{name}')}/parallelism"
        await self._request(Call(method="PUT", path=path, json=asdict(layout)))

    async def switch_tp(self, name: str, tp: int, kv: str) -> None:
        """Change the size of a deployment's tensor-parallel groups.

        Raises:
            PlexRLError: its engines cannot do it now.
        """
        path = f"{deployment_path(f'{self._job}/{name}')}/tp"
        await self._request(Call(method="POST", path=path, json={"tp": tp, "kv": kv}))

    async def acknowledge(self, operation: str) -> None:
        """Let the deployment that a failed operation has halted take others."""
        path = f"/v1/operations/{quote(operation, safe='')}/acknowledge"
        await self._request(Call(method="POST", path=path))

    async def job_state(self) -> str:
        """The job's state.

        Raises:
            PlexRLError: there is no such job.
        """
        path = f"/v1/jobs/{quote(self._job)}"
        return str((await self._request(Call(method="GET", path=path))).json()["state"])

    async def _submit(self, submission: Submission, operation: str) -> None:
        await self._request(replace(submission.call, query={"operation": operation}))

    async def _result(self, decoder: Decoder, operation: str) -> Any:
        while True:
            response = await self._request(poll_call(operation, POLL_S))
            if response.status_code != 202:
                params, arrays = decode_body(bytearray(response.content))
                return decoder(params["result"], arrays)

    async def _request(self, call: Call) -> Any:
        """Send a request until a router answers."""
        while True:
            try:
                return await self._transport.request(call)
            except ConnectionLostError as error:
                LOG.warning("no router answers: %s; trying again", error)


def _sample(row: Mapping[str, Any]) -> Sample:
    return ended_sample(
        row["tokens"],
        row["logprobs"],
        row["finish_reason"],
        row["weights"],
        row.get("sampling_logprobs"),
    )
