"""A rollout deployment's OpenAI-compatible endpoint, for any client or agent harness."""

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING
from urllib.parse import quote

from plexrl.client.data.results import CapturedSegment, decode_segments
from plexrl.wire.parameter_checks import check_name

if TYPE_CHECKING:
    from plexrl.client.calls.transport import Transport


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAIAccess:
    """Address and key for a client of OpenAI's API: `OpenAI(base_url=…, api_key=…)`."""

    base_url: str
    """URL below which the endpoints are; ends in `/v1`."""
    api_key: str = field(repr=False)
    """Opens this job's endpoints only, until the job ends or has another controller."""
    model: str
    """Name of the model in requests."""

    def for_trajectory(self, name: str) -> "OpenAIAccess":
        """The same endpoint, whose calls are captured as the trajectory `name`.

        Raises:
            InvalidRequestError: `name` cannot be a file name.
        """
        check_name("trajectory", name)
        root = re.sub(r"(/trajectories/[^/]+)?/v1$", "", self.base_url)
        return replace(self, base_url=f"{root}/trajectories/{quote(name)}/v1")


def open_access(transport: "Transport", deployment: str) -> OpenAIAccess:
    """The endpoint of `<job>/<name>` with a new key of the job, at the router in use."""
    job, _, name = deployment.rpartition("/")
    made = transport.ask("POST", f"/v1/jobs/{quote(job)}/keys")
    base = f"{transport.url}/v1/jobs/{quote(job)}/deployments/{quote(name)}/openai/v1"
    return OpenAIAccess(base_url=base, api_key=made["api_key"], model=name)


def read_captured(
    transport: "Transport", deployment: str, trajectory: str
) -> list[CapturedSegment]:
    """The segments of a captured trajectory."""
    check_name("trajectory", trajectory)
    job, _, name = deployment.rpartition("/")
    path = f"/v1/jobs/{quote(job)}/deployments/{quote(name)}/openai/trajectories"
    return decode_segments(transport.ask("GET", f"{path}/{quote(trajectory)}/captured"))
