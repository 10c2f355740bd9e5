"""Moves of a worker's whole state, through the StateManager."""

import ctypes
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plexrl.errors import ConflictError
from plexrl.statemanager.client.client import LoadReport, MoveReport, StateManagerClient
from plexrl.wire.operations import CheckpointParams, OperationKind
from plexrl.worker.process.backend import Backend
from plexrl.worker.state.checkpointing import save_checkpoint
from plexrl.worker.state.weight_sync import SplitVersionError, sync_weights

if TYPE_CHECKING:
    from plexrl.statemanager.layout.keys import StateSlice

MOVES = frozenset(
    {
        OperationKind.LOAD,
        OperationKind.OFFLOAD,
        OperationKind.SNAPSHOT,
        OperationKind.PUBLISH,
        OperationKind.SYNC_WEIGHTS,
    }
)
LOG = logging.getLogger(__name__)

HEAP_KEPT_BYTES = 256 << 20
"""Free heap that a worker may keep over an offload, for activations."""

Plain = dict[str, Any]


class StateMover:
    """Knows whether the state is on the device; the StateManager knows all else."""

    def __init__(self, backend: Backend, client: StateManagerClient, group: str) -> None:
        self._backend = backend
        self._client = client
        self._group = group
        self._built = False
        self._was_offloaded = False
        self._registered: tuple[StateSlice, ...] | None = None
        """What the StateManager knows of the arena; absent: nothing."""
        self.is_resident = False
        # For good: such a process is about to be ended.
        self._is_split = False

    def move(self, kind: OperationKind, command: Plain) -> Plain:
        """Carry out one of `MOVES`; returns what was measured.

        Raises:
            PlexRLError: refused; the state is where it was.
        """
        if not self.is_resident and kind != OperationKind.LOAD:
            raise ConflictError(f"{kind.value} needs the state on the device; it is offloaded")
        seq, token = int(command["seq"]), int(command["token"])
        previous_seq = int(command.get("previous_seq", 0))
        match kind:
            case OperationKind.LOAD:
                return self._load(seq, token, previous_seq)
            case OperationKind.OFFLOAD:
                return self._offload(seq, token, previous_seq, command)
            case OperationKind.SNAPSHOT:
                parts = self._backend.live_parts()
                keep_seq = int(command["keep_seq"])
                return _plain(
                    self._client.snapshot(
                        seq=seq,
                        keep_seq=keep_seq,
                        token=token,
                        parts=parts,
                        previous_seq=previous_seq,
                    )
                )
            case OperationKind.PUBLISH:
                self._check_weights()
                report = self._client.publish(seq=seq, token=token)
                return {**_plain(report), "trainer_step": self._trainer_step()}
            case _:
                try:
                    return sync_weights(self._backend, self._client, command)
                except SplitVersionError:
                    self._is_split = True
                    raise

    @property
    def is_torn(self) -> bool:
        """A weight sync was cut, so what is on the device is of no version: on this rank, or over
        the ranks of one engine."""
        return self._is_split or self._client.is_torn

    def written(self) -> None:
        """An operation other than a move has written to the state."""
        self._client.forget_pulled()

    def save_checkpoint(self, command: Plain, params: CheckpointParams) -> Plain:
        """Have a checkpoint written of what is on the device. Raises as `save_checkpoint`, and
        `NonFiniteWeightsError`."""
        self._check_weights()
        return save_checkpoint(
            self._backend,
            self._client,
            params,
            operation=str(command["operation"]),
            seq=int(command["seq"]),
            keep_seq=int(command["keep_seq"]),
            token=int(command["token"]),
            previous_seq=int(command.get("previous_seq", 0)),
            trainer_step=self._trainer_step(),
        )

    def _trainer_step(self) -> int:
        """Optimizer steps in the weights of a backend that trains."""
        return int(getattr(self._backend, "trainer_step", 0))

    def _check_weights(self) -> None:
        """Raises `NonFiniteWeightsError` where the backend finds weights that are not finite."""
        check = getattr(self._backend, "check_weights", None)
        if check is not None:
            check()

    def _load(self, seq: int, token: int, previous_seq: int) -> Plain:
        if self.is_resident:
            return {}
        if not self._built:
            self._backend.build()
            self._built = True
        measured: Plain = {}
        # A process that has just built the model holds version 0: its bits depend on the spec only.
        is_stored = seq > 0 or self._was_offloaded
        if is_stored:
            report = self._load_version(seq, token, previous_seq)
            self._backend.after_load(report.parts)
            measured = _plain(report)
        else:
            self._register(token)
            self._client.attach()
        base_bytes = self._borrow_base(token, is_stored=is_stored)
        if base_bytes is not None:
            measured["base_bytes_filled"] = base_bytes
        self.is_resident = True
        return measured

    def _borrow_base(self, token: int, *, is_stored: bool) -> int | None:
        """Have the frozen weights on the device too, if there are some; returns the bytes that were
        not there already. Raises as `StateManagerClient.borrow_base`."""
        base = getattr(self._backend, "frozen_base", None)
        if base is None:
            return None
        # Without a base the arena's memory goes back too, and what was built is in no store.
        built = b"" if is_stored else bytes(self._backend.arena.buffer)
        try:
            filled = self._client.borrow_base(
                base.arena, content=base.content, token=token, fill=base.fill
            )
        except BaseException:
            self._backend.arena.buffer[: len(built)] = built
            raise
        base.forget_built()
        return filled

    def _load_version(self, seq: int, token: int, previous_seq: int) -> LoadReport:
        """Load into the arena, which is registered once for the process's life; with host memory
        beside it, every time, as that is told of anew."""
        if self._backend.host_arena is None and self._backend.slices() == self._registered:
            try:
                return self._client.load(seq=seq, token=token, previous_seq=previous_seq)
            except ConflictError as error:
                LOG.info("the arena is registered again: %s", error)
        self._register(token)
        return self._client.load(seq=seq, token=token, previous_seq=previous_seq)

    def _register(self, token: int) -> None:
        slices = self._backend.slices()
        self._registered = None
        self._client.register(
            self._backend.arena,
            slices,
            group=self._group,
            token=token,
            host=self._backend.host_arena,
        )
        self._registered = slices

    def _offload(self, seq: int, token: int, previous_seq: int, command: Plain) -> Plain:
        self._backend.before_offload()
        before = self._memory()
        parts = self._backend.live_parts()
        report = self._client.offload(
            seq=seq,
            keep_seq=int(command["keep_seq"]),
            token=token,
            parts=parts,
            next_use_s=command.get("next_use_s"),
            previous_seq=previous_seq,
        )
        self.is_resident = False
        self._was_offloaded = True
        _trim_heap()
        return {**_plain(report), "memory_before": before, "memory_after": self._memory()}

    def _memory(self) -> dict[str, int]:
        return {"arena_bytes": self._backend.arena.resident_bytes(), "rss_bytes": rss_bytes()}


def rss_bytes() -> int:
    """Memory that this process has resident, shared pages included."""
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


class _HeapFigures(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def _trim_heap() -> None:
    """Give the C library's free memory back where it is much (glibc 2.33; elsewhere no effect).

    What little there is is the next operation's scratch: giving it back at every switch was
    measured to make that operation a third slower.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        return
    libc.mallinfo2.restype = _HeapFigures
    if libc.mallinfo2().fordblks > HEAP_KEPT_BYTES:
        libc.malloc_trim(0)


def _plain(report: MoveReport) -> Plain:
    return {
        "bytes_moved": report.bytes_moved,
        "seconds": report.seconds,
        "tier": report.tier,
    }
