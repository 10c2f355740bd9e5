"""A dry run of a controller: it declares its job and its deployments, and nothing else happens.

`DeclaringTransport` stands between the SDK and the cluster. It answers the submission of a job and
the creation of deployments itself, and keeps them; it lets reads pass; and it refuses all other
requests. With a file (`plexrl quote script.py`) it writes the declarations there, and ends the
script where it would begin to work.
"""

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plexrl.client.calls.transport import Call, Transport
from plexrl.client.profiling.job_quotes import QUOTE_PATH, asked_of
from plexrl.errors import ConflictError, InvalidRequestError
from plexrl.ids import JobId, TenantId
from plexrl.wire.messages.views import JobView

if TYPE_CHECKING:
    import httpx

FILE_VARIABLE = "PLEXRL_QUOTE_FILE"
"""Where the declarations of a script go; set by `plexrl quote`."""


@dataclass(slots=True)
class Declaration:
    """What a dry run has declared so far, as bodies of requests."""

    job: dict[str, Any] | None = None
    deployments: list[dict[str, Any]] = field(default_factory=list)
    path: str = ""
    """Path of the job, which has an id that no job of the cluster has."""

    def body(self) -> dict[str, object]:
        """The declared part of a request for a quote.

        Raises:
            InvalidRequestError: nothing was declared.
        """
        if self.job is None or not self.deployments:
            raise InvalidRequestError(
                "nothing was declared: a dry run creates its job and its deployments first"
            )
        return {**asked_of(self.job), "deployments": self.deployments}


class DeclaringTransport(Transport):
    """The connections of `transport`, for a dry run. Copies share the declaration."""

    def __init__(self, transport: Transport, file: Path | None = None) -> None:
        """`file` gets the declarations; absent: the caller asks for them."""
        self.__dict__.update(transport.__dict__)
        self.declared = Declaration()
        self._file = file

    @classmethod
    def over(cls, transport: Transport) -> "DeclaringTransport":
        """A transport for the next dry run: `transport` itself if a script is one."""
        return transport if isinstance(transport, cls) else cls(transport)

    def request(self, call: Call) -> "httpx.Response":
        """Answer a declaration, or pass a read on.

        Raises:
            ConflictError: the request would change something.
        """
        declared = self.declared
        if call.method == "POST" and call.path == "/v1/jobs" and declared.job is None:
            return self._declare_job(call.json)
        if call.method == "POST" and call.path == f"{declared.path}/deployments":
            return self._declare_deployment(call.json)
        is_own = bool(declared.path) and call.path.startswith(declared.path)
        if (call.method == "GET" and not is_own) or call.path == QUOTE_PATH:
            return super().request(call)
        if self._file is not None:
            # Not an error that the script could handle.
            raise SystemExit(0)
        raise ConflictError(
            f"this is a dry run, which takes deployments and `quote`, but no {call.method} "
            f"{call.path}: create the job without dry_run to run it"
        )

    def _declare_job(self, body: Mapping[str, Any]) -> "httpx.Response":
        job = f"dry-run-{uuid.uuid4().hex}"
        self.declared.job = dict(body)
        self.declared.path = f"/v1/jobs/{job}"
        self._write()
        return _response(_job_view(job, body))

    def _declare_deployment(self, body: Mapping[str, Any]) -> "httpx.Response":
        self.declared.deployments.append(dict(body))
        self._write()
        job = self.declared.path.rpartition("/")[2]
        return _response({"deployment": f"{job}/{body['name']}"})

    def _write(self) -> None:
        if self._file is not None:
            found = {"job": self.declared.job, "deployments": self.declared.deployments}
            self._file.write_text(json.dumps(found))


def declaring_for(transport: Transport, environment: Mapping[str, str]) -> Transport:
    """The transport of a script that `plexrl quote` runs, or `transport` itself."""
    file = environment.get(FILE_VARIABLE)
    return DeclaringTransport(transport, Path(file)) if file else transport


def _response(body: object) -> "httpx.Response":
    import httpx

    return httpx.Response(201, json=body)


def _job_view(job: str, body: Mapping[str, Any]) -> JobView:
    """A job that nothing has happened to."""
    return {
        "job": JobId(job),
        "tenant": TenantId(body.get("tenant") or ""),
        "name": body["name"],
        "state": "QUEUED",
        "attached": True,
        "reason": "",
        "failure": None,
        "priority": body.get("priority", 0),
        "slo": body.get("slo") or 0.0,
        "gpu_seconds": 0.0,
        "controller_timeout_s": body.get("controller_timeout_s", 60.0),
        "submitted_at": 0.0,
        "ended_at": None,
        "deployments": [],
    }
