"""Runs on the disk, `runs/RUN/` of the data directory: a router writes what shall run, and whether
it shall stop; the service writes how far it is. Each file has one writer."""

import base64
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from plexrl.errors import ConflictError, NotFoundError
from plexrl.process.folders.durable_files import write_durably
from plexrl.process.folders.private_folder import make_private_folder
from plexrl.rewards.sandbox.command import START_MARK
from plexrl.wire.messages.cluster_views import RunView

FOLDER = "runs"
SPEC, STATE, STOP, LOG = "spec.json", "state.json", "stop", "controller.log"
LOG_TAIL_BYTES = 1 << 18
RECORDS_MAX = 100
"""Ended runs of a tenant that are kept."""

State = Literal["waiting", "running", "completed", "failed", "stopped"]
ENDED = ("completed", "failed", "stopped")


class RunSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What shall run."""

    run: str
    """Its id, which is that of the first job that the script creates, too."""
    tenant: str
    script: str
    """Name of the file to run."""
    files: dict[str, bytes]
    """The script and others beside it, by name."""
    arguments: tuple[str, ...] = ()
    memory_bytes: int = 2 << 30
    cpu_s: int = 24 * 3600
    wall_s: float = 24 * 3600.0
    """Time of all attempts together."""
    restarts: int = 3
    """Starts after the first one, if the script fails or is killed."""
    created_at: float


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """How far a run is."""

    state: State = "waiting"
    attempts: int = 0
    """Starts so far. One that is repeated because the service was killed does not count."""
    exit_code: int | None = None
    """Of the last attempt that has ended."""
    reason: str = ""
    started_at: float | None = None
    ended_at: float | None = None
    key: str = ""
    """Id of the API key of the present attempt."""


@dataclass(frozen=True, slots=True)
class RunRecords:
    """The runs of a data directory."""

    folder: Path

    def add(self, spec: RunSpec, *, live_max: int) -> None:
        """Write a new run; the service starts it soon. The tenant's oldest ended ones are deleted.

        Raises:
            ConflictError: the tenant has `live_max` runs that have not ended.
            OSError: it cannot be written.
        """
        own = [run for run in self.names() if self.spec(run).tenant == spec.tenant]
        ended = [run for run in own if self.state(run).state in ENDED]
        if len(own) - len(ended) >= live_max:
            raise ConflictError(
                f"tenant {spec.tenant!r} has {live_max} runs: wait for one to end, or stop one "
                "(plexrl runs stop RUN)"
            )
        for run in sorted(ended, key=lambda each: self.spec(each).created_at)[: -RECORDS_MAX + 1]:
            shutil.rmtree(self.folder / run)
        make_private_folder(self.folder)
        make_private_folder(self.folder / spec.run)
        write_durably(self.folder / spec.run / SPEC, msgspec.json.encode(spec), mode=0o600)

    def names(self) -> list[str]:
        """The ids of all runs."""
        return sorted(path.parent.name for path in self.folder.glob(f"*/{SPEC}"))

    def spec(self, run: str) -> RunSpec:
        """Raises `NotFoundError`: there is no such run."""
        try:
            text = (self.folder / os.path.basename(run) / SPEC).read_bytes()  # noqa: PTH119
        except OSError as error:
            raise NotFoundError(f"there is no run {run!r}: plexrl runs lists yours") from error
        return msgspec.json.decode(text, type=RunSpec)

    def state(self, run: str) -> RunState:
        """How far a run is."""
        try:
            text = (self.folder / run / STATE).read_bytes()
        except FileNotFoundError:
            return RunState()
        return msgspec.json.decode(text, type=RunState)

    def write_state(self, run: str, state: RunState) -> None:
        """Record how far a run is."""
        write_durably(self.folder / run / STATE, msgspec.json.encode(state), mode=0o600)

    def stop(self, run: str) -> None:
        """Ask the service to stop a run."""
        write_durably(self.folder / run / STOP, b"", mode=0o600)

    def shall_stop(self, run: str) -> bool:
        """Whether a run shall stop."""
        return (self.folder / run / STOP).exists()

    def log_path(self, run: str) -> Path:
        """The file with what the script prints."""
        return self.folder / run / LOG

    def log(self, run: str, lines: int) -> str:
        """The last lines that the script has printed."""
        try:
            with self.log_path(run).open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - LOG_TAIL_BYTES))
                text = file.read().replace(START_MARK, b"").decode(errors="replace")
        except FileNotFoundError:
            return ""
        return "\n".join(text.splitlines()[-lines:])

    def log_for(self, tenant: str | None, run: str, lines: int) -> str:
        """As `log`, if there is such a run of the tenant (None: of any); otherwise empty."""
        try:
            is_own = tenant in (None, self.spec(run).tenant)
        except NotFoundError:
            return ""
        return self.log(run, lines) if is_own else ""

    def view(self, run: str) -> RunView:
        """Raises `NotFoundError`: there is no such run."""
        spec, state = self.spec(run), self.state(run)
        return {
            "run": run,
            "tenant": spec.tenant,
            "script": spec.script,
            "state": state.state,
            "attempts": state.attempts,
            "exit_code": state.exit_code,
            "reason": state.reason,
            "created_at": spec.created_at,
            "started_at": state.started_at,
            "ended_at": state.ended_at,
        }


def decode_files(plain: Mapping[str, str]) -> dict[str, bytes]:
    """Files as they are sent, base64. Raises `ValueError`."""
    return {name: base64.b64decode(text, validate=True) for name, text in plain.items()}
