"""Operations that the rollout service submits through a router, for one job.

Operation ids are functions of the rollout's history. So a call that is repeated after a crash finds
the operation of the first one, and its result.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import quote

from plexrl.client.calls import requests
from plexrl.client.calls.requests import Submission
from plexrl.client.calls.transport import AsyncTransport, Call, deployment_path
from plexrl.client.data import results
from plexrl.client.data.results import Decoder, GenerateResult, Sample
from plexrl.client.futures.futures import POLL_S, poll_call
from plexrl.errors import ConnectionLostError, OperationCancelledError, PlexRLError
from plexrl.wire.operations import OperationKind, SamplingParams, SyncWeightsParams
from plexrl.wire.tensors import decode_body

LOG = logging.getLogger(__name__)

STATS_TIMEOUT_S = 5.0
Plain = dict[str, Any]


class ClusterCalls:
    """Calls about one job."""

    def __init__(self, transport: AsyncTransport, job: str) -> None:
        self._transport = transport
        self._job = job

    async def generate(
        self, deployment: str, prompt: Sequence[int], sampling: SamplingParams, operation: str
    ) -> None:
        """Begin to draw one sample of a prompt.

        Raises:
            PlexRLError: it was refused.
        """
        name = f"{self._job}/{deployment}"
        submission = requests.generate(name, [prompt], 1, sampling, stream=False)
        await self._submit(submission, operation)

    async def sample(self, operation: str) -> Sample | None:
        """The sample of a `generate`, once it has ended. None: it was cancelled before it began.

        Raises:
            PlexRLError: the generation failed.
        """
        try:
            result = await self._result(results.generate_decoder(1), operation)
        except OperationCancelledError:
            return None
        assert isinstance(result, GenerateResult)
        return result.samples[0][0]

    async def pull(self, deployment: str, source: str, operation: str) -> int:
        """Set a deployment's weights to those of `source`; returns the trainer's step in them.

        Raises:
            PlexRLError: the sync failed.
        """
        params = SyncWeightsParams(source=f"{self._job}/{source}")
        name = f"{self._job}/{deployment}"
        submission = requests.submission(
            name, OperationKind.SYNC_WEIGHTS, params, results.decode_plain
        )
        await self._submit(submission, operation)
        return int((await self._result(submission.decoder, operation))["trainer_step"])

    async def cancel(self, operation: str) -> None:
        """End a generation early; one that has ended stays as it is."""
        path = f"/v1/operations/{quote(operation, safe='')}"
        await self._request(Call(method="DELETE", path=path))

    async def engine(self, deployment: str) -> Plain | None:
        """Statistics of a deployment's engine; None: it gives none now."""
        path = deployment_path(f"{self._job}/{deployment}")
        try:
            async with asyncio.timeout(STATS_TIMEOUT_S):
                response = await self._transport.request(Call(method="GET", path=path))
        except (TimeoutError, PlexRLError):
            return None
        engines = response.json()["engines"]
        return dict(engines[0]) if engines else None

    async def deployment(self, name: str) -> Plain:
        """A deployment's status.

        Raises:
            UnknownDeploymentError: there is none.
            PlexRLError: its status cannot be read now.
        """
        call = Call(method="GET", path=deployment_path(f"{self._job}/{name}"))
        return dict((await self._transport.request(call)).json())

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
