"""Scripts that run on the cluster: what `plexrl run` and `plexrl runs` send."""

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from plexrl.errors import InvalidRequestError

if TYPE_CHECKING:
    from plexrl.client.calls.transport import Transport
    from plexrl.wire.messages.cluster_views import Runs, RunView


class ScriptRuns:
    """The runs of the tenant; of the operator those of all tenants."""

    def __init__(self, transport: "Transport") -> None:
        self._transport = transport

    def start(
        self,
        script: Path,
        arguments: Sequence[str] = (),
        *,
        files: Sequence[Path] = (),
        memory_bytes: int = 2 << 30,
        wall_s: float = 24 * 3600.0,
        restarts: int = 3,
    ) -> "RunView":
        """Run `script` with `arguments` on the cluster, with `files` in its folder.

        It is killed with all its processes after `wall_s` seconds; each process has `memory_bytes`.
        If it fails or is killed it is started again, at most `restarts` times: the job that it
        creates first has the run's id, and is taken over.

        Raises:
            ConflictError: the operator has not allowed runs, or the tenant has too many.
            InvalidRequestError: a file cannot be read, two have one name, or a number is out of
                range.
        """
        sent = (script, *files)
        names = {path.name for path in sent}
        if len(names) < len(sent):
            raise InvalidRequestError(
                f"{len(sent)} files have {len(names)} names ({', '.join(sorted(names))}), and all "
                "lie in one folder: give each a name of its own"
            )
        body = {
            "script": script.name,
            "files": {path.name: _encoded(path) for path in sent},
            "arguments": list(arguments),
            "memory_bytes": memory_bytes,
            "wall_s": wall_s,
            "restarts": restarts,
        }
        view: RunView = self._transport.ask("POST", "/v1/runs", body=body)
        return view

    def list(self) -> "list[RunView]":
        """All runs, oldest first."""
        found: Runs = self._transport.ask("GET", "/v1/runs")
        return found["runs"]

    def get(self, run: str) -> "RunView":
        """One run. Raises `NotFoundError`."""
        view: RunView = self._transport.ask("GET", f"/v1/runs/{quote(run)}")
        return view

    def log(self, run: str, *, lines: int = 100) -> str:
        """The last lines that it has printed. Raises `NotFoundError`."""
        path = f"/v1/runs/{quote(run)}/log"
        text: str = self._transport.ask("GET", path, query={"lines": lines})["text"]
        return text

    def stop(self, run: str) -> None:
        """Stop it, and cancel its job. Raises `NotFoundError`."""
        self._transport.ask("POST", f"/v1/runs/{quote(run)}/stop")


def _encoded(path: Path) -> str:
    try:
        return base64.b64encode(path.read_bytes()).decode()
    except OSError as error:
        raise InvalidRequestError(f"{path} cannot be read: {error}") from error
