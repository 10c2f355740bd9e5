"""Runs on the disk, `runs/RUN/` of the data directory: a router writes what shall run, and whether
it shall stop; the service writes how far it is. Each file has one writer."""

import base64
import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from plexrl.errors import (
    ConflictError,
    NotFoundError,
    StorageFullError,
    StorageUnavailableError,
)
from plexrl.process.folders.disk_errors import NO_SPACE
from plexrl.process.folders.durable_files import flush, write_durably
from plexrl.process.folders.private_folder import make_private_folder
from plexrl.process.sandbox.command import START_MARK
from plexrl.wire.messages.cluster_views import RunView

FOLDER = "runs"
SPEC, STATE, STOP, LOG = "spec.json", "state.json", "stop", "controller.log"
LOCK = "lock"
"""Held while a run is added: routers are several."""
LOG_TAIL_BYTES = 1 << 18
RECORDS_MAX = 100
"""Ended runs of a tenant that are kept."""

State = Literal["waiting", "running", "completed", "failed", "stopped"]
ENDED = ("completed", "failed", "stopped")


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What shall run, without its files: they have megabytes."""

    run: str
    """Its id, which is that of the first job that the script creates, too."""
    tenant: str
    script: str
    """Name of the file to run."""
    created_at: float


class RunSpec(RunSummary, frozen=True, kw_only=True):
    """What shall run."""

    files: dict[str, bytes]
    """The script and others beside it, by name."""
    arguments: tuple[str, ...] = ()
    memory_bytes: int = 2 << 30
    cpu_s: int = 24 * 3600
    wall_s: float = 24 * 3600.0
    """Time from the first start on, over all attempts."""
    restarts: int = 3
    """Starts after the first one, if the script fails or is killed."""
    user: str = ""
    """Who started it, and answers for what it does; empty: nobody in particular."""


SpecT = TypeVar("SpecT", bound=RunSummary)


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
            StorageError: it cannot be written.
        """
        with self._writing(), self._adding():
            own = [each for each in self.summaries() if each.tenant == spec.tenant]
            ended = [each for each in own if self.state(each.run).state in ENDED]
            if len(own) - len(ended) >= live_max:
                raise ConflictError(
                    f"tenant {spec.tenant!r} has {live_max} runs: wait for one to end, or stop one "
                    "(plexrl runs stop RUN)"
                )
            for each in sorted(ended, key=lambda each: each.created_at)[: -RECORDS_MAX + 1]:
                self._delete(each.run)
            make_private_folder(self.folder / spec.run)
            try:
                write_durably(self.folder / spec.run / SPEC, msgspec.json.encode(spec), mode=0o600)
            except OSError:
                shutil.rmtree(self.folder / spec.run, ignore_errors=True)
                raise

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            kind = StorageFullError if error.errno in NO_SPACE else StorageUnavailableError
            raise kind(f"{self.folder} cannot be written: {error}") from error

    @contextmanager
    def _adding(self) -> Iterator[None]:
        make_private_folder(self.folder)
        with (self.folder / LOCK).open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _delete(self, run: str) -> None:
        # What shall run goes first: without its state, an ended run would begin anew.
        (self.folder / run / SPEC).unlink()
        flush(self.folder / run)
        shutil.rmtree(self.folder / run)

    def names(self) -> list[str]:
        """The ids of all runs."""
        return sorted(path.parent.name for path in self.folder.glob(f"*/{SPEC}"))

    def summaries(self) -> list[RunSummary]:
        """All runs, without those that are deleted meanwhile."""
        found = []
        for run in self.names():
            with suppress(NotFoundError):
                found.append(self.summary(run))
        return found

    def spec(self, run: str) -> RunSpec:
        """Raises `NotFoundError`: there is no such run."""
        return self._read(run, RunSpec)

    def summary(self, run: str) -> RunSummary:
        """Raises `NotFoundError`: there is no such run."""
        return self._read(run, RunSummary)

    def _read(self, run: str, kind: type[SpecT]) -> SpecT:
        try:
            text = (self.folder / os.path.basename(run) / SPEC).read_bytes()  # noqa: PTH119
        except (OSError, ValueError) as error:
            # `ValueError`: a zero byte in the id.
            raise NotFoundError(f"there is no run {run!r}: plexrl runs lists yours") from error
        return msgspec.json.decode(text, type=kind)

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
        """Ask the service to stop a run. Any number of callers may at the same time.

        Raises:
            StorageError: it cannot be written.
        """
        with self._writing():
            (self.folder / run / STOP).touch(mode=0o600)
            flush(self.folder / run)

    def shall_stop(self, run: str) -> bool:
        """Whether a run shall stop."""
        return (self.folder / run / STOP).exists()

    def log_path(self, run: str) -> Path:
        """The file with what the script prints."""
        return self.folder / run / LOG

    def cut_log(self, run: str) -> None:
        """Keep of a log what `log` reads: ended runs are many."""
        with suppress(FileNotFoundError), self.log_path(run).open("r+b") as file:
            size = file.seek(0, os.SEEK_END)
            if size > LOG_TAIL_BYTES:
                file.seek(size - LOG_TAIL_BYTES)
                tail = file.read()
                file.seek(0)
                file.write(tail)
                file.truncate()

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
            is_own = tenant in (None, self.summary(run).tenant)
        except NotFoundError:
            return ""
        return self.log(run, lines) if is_own else ""

    def view(self, run: str) -> RunView:
        """Raises `NotFoundError`: there is no such run."""
        return self.view_of(self.summary(run))

    def view_of(self, spec: RunSummary) -> RunView:
        """How far a run is, for its tenant."""
        state = self.state(spec.run)
        return {
            "run": spec.run,
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
