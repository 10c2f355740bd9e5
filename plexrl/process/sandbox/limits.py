"""Limits of a program in the sandbox, and the end of its run."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from plexrl.errors import InvalidRequestError
from plexrl.limits import LIMITS

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds on one run. The wall time is an argument of the run."""

    memory_bytes: int = 512 * MIB
    """Address space of each process and, with control groups, memory of all processes together.
    Without control groups all processes together may use `processes` times as much."""
    cpu_s: int = 60
    """CPU time of each process."""
    processes: int = 64
    """Processes and threads at one time."""
    open_files: int = 256
    """Open files of each process."""
    tmp_bytes: int = 64 * MIB
    """Size of `/tmp`, of `/dev/shm` and of the largest file there. Both lie in memory, and no other
    folder is writable."""
    output_bytes: int = 4 * MIB
    """Size of the standard output, and of the standard error."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            LIMITS["sandbox"][name].check(name, getattr(self, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A command, and the files and the standard input that it gets."""

    command: tuple[str, ...]
    """Program and arguments, as they are called inside of the sandbox."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Read-only files in `/program`, by name."""
    stdin: bytes = b""

    def __post_init__(self) -> None:
        for name in self.files:
            if not name or "/" in name or "\0" in name or name in (".", ".."):
                raise InvalidRequestError(f"file {name!r} of a program: give a name without '/'")


class Ending(StrEnum):
    """How a run ended."""

    EXITED = "exited"
    """By itself; `ProgramRun.exit_code` says how."""
    TIMED_OUT = "timed_out"
    """It was killed after its wall time."""
    KILLED = "killed"
    """It reached the limit `ProgramRun.limit`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramRun:
    """The end of a program. All processes of it are gone."""

    ending: Ending
    exit_code: int | None
    """128 + number of the signal that ended it. None if the run did not end by itself."""
    limit: str | None = None
    """`cpu`, `file_size`, `memory` or `output`; None if no limit ended the run."""
    stdout: bytes
    """At most `output_bytes` of it, as for `stderr`."""
    stderr: bytes
    wall_s: float
    """From the start of the command to its end."""
