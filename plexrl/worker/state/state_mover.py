"""Moves a worker's whole state between the device and the StateManager."""

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from plexrl.errors import ConflictError
from plexrl.process.garbage_collection import trim_heap
from plexrl.statemanager.client.client import StateManagerClient
from plexrl.statemanager.client.reports import LoadReport, MoveReport
from plexrl.statemanager.protocol.messages import DeviceUse, MakeRoom
from plexrl.wire.messages import (
    Load,
    Offload,
    Publish,
    SaveCheckpoint,
    SaveRequest,
    Snapshot,
    Sync,
)
from plexrl.wire.messages.workers import RunResult
from plexrl.worker.interface.backend import Backend, BackendCall, BackendResult
from plexrl.worker.state.contents.replicas import ReplicaDigests
from plexrl.worker.state.device import CPU, WorkerDevice
from plexrl.worker.state.host.stored_step import StoredSteps
from plexrl.worker.state.rank_agreement import on_all_ranks
from plexrl.worker.state.save_checkpoint import save_checkpoint
from plexrl.worker.state.weight_sync import Arrival, SplitVersionError, sync_weights

if TYPE_CHECKING:
    from plexrl.statemanager.layout.keys import StateSlice

LOG = logging.getLogger(__name__)

HEAP_KEPT_BYTES = 256 << 20
"""Free heap that a worker may keep after an offload, for activations."""


class StateMover:
    """Tracks whether the state is on the device. The StateManager tracks everything else."""

    def __init__(
        self,
        backend: Backend,
        client: StateManagerClient,
        group: str,
        device: WorkerDevice = CPU,
    ) -> None:
        self._device = device
        self._backend = backend
        self._client = client
        self._group = group
        self._is_laid_out = self._is_materialised = False
        self._was_offloaded = False
        self._offloaded_step = 0
        """The backend's `trainer_step` when the state was last offloaded: it is read from the
        state."""
        self._registered: tuple[StateSlice, ...] | None = None
        """The slices that the StateManager has registered; absent: none."""
        self.is_resident = False
        # Never reset: such a process ends soon.
        self._is_split = False
        self._peak_bytes = 0
        """The largest peak of the framework's allocator so far."""
        self._outside_bytes = 0
        """Device memory that `lay_out` took, neither for the arena nor by the framework's
        allocator: buffers of communication libraries."""
        self.arrival = Arrival(backend, client)
        self._replicas = ReplicaDigests(backend, client, device)
        self._stored_steps = StoredSteps(backend, client)

    def take_peak_bytes(self) -> int:
        """As `WorkerDevice.take_peak_bytes`, and what the framework holds outside of its allocator;
        later loads need as much free memory as the first."""
        found = self._device.take_peak_bytes()
        self._peak_bytes = max(self._peak_bytes, found)
        return found + self._outside_bytes

    def move(self, command: Load | Offload | Snapshot | Publish | Sync) -> RunResult:
        """Carry out a command that moves state; returns measurements.

        Raises:
            PlexRLError: refused; the state did not move.
        """
        if not self.is_resident and not isinstance(command, Load):
            kind = command.kind.value
            raise ConflictError(f"{kind} needs the state on the device; it is offloaded")
        self._device.wait()
        match command:
            case Load():
                return self._load(command)
            case Offload():
                return self._offload(command)
            case Snapshot():
                parts = self._backend.live_parts()
                digests = self._replicas.of_state(parts, command.seq)
                return _plain(self._client.snapshot(command.save, parts=parts, digests=digests))
            case Publish():
                self._backend.check_weights()
                digests = self._replicas.of_published()
                report = self._client.publish(seq=command.seq, token=command.token, digests=digests)
                return {**_plain(report), "trainer_step": self._backend.trainer_step}
            case Sync():
                try:
                    self.arrival.began(command)
                    return sync_weights(self._backend, self._client, command)
                except SplitVersionError:
                    self._is_split = True
                    raise

    @property
    def is_torn(self) -> bool:
        """Whether an interrupted weight sync left a mix of two versions on the device: on this
        rank, or across the ranks of one engine."""
        return self._is_split or self._client.is_torn

    def written(self) -> None:
        """Record that an operation other than a move has written to the state."""
        self._client.forget_pulled()

    def save_checkpoint(self, command: SaveCheckpoint) -> RunResult:
        """Save a checkpoint of the state, on the device or as it was offloaded. Raises as
        `save_checkpoint`, `NonFiniteWeightsError`, and `ConflictError` if the offloaded weights
        were not checked."""
        if self.is_resident:
            self._backend.check_weights()
            self._device.wait()
            return save_checkpoint(self._backend, self._client, command)
        if not self._backend.weights_are_checked:
            raise ConflictError("the offloaded weights were not checked: load them first")
        step = self._offloaded_step
        return save_checkpoint(self._backend, self._client, command, offloaded_step=step)

    def step_stored(self, call: BackendCall, order: SaveRequest) -> BackendResult:
        """Run an optim_step on the offloaded state. Raises as `StoredSteps.run`."""
        if self.is_resident or not self._is_materialised:
            raise ConflictError("the state is not offloaded by these processes: load it first")
        result = self._stored_steps.run(call, order)
        self._offloaded_step = result.result.get("trainer_step", self._offloaded_step)
        return result

    def _load(self, command: Load) -> RunResult:
        if self.is_resident:
            return {}
        if not self._is_laid_out:
            self._lay_out(command.token)
        self._client.expect_use(self._use())
        measured: RunResult = {}
        # Version 0 is not loaded: any process that materialises the model gets the same bits.
        is_stored = command.seq > 0 or self._was_offloaded
        base_bytes = None
        if not (is_stored and self._is_materialised):
            base_bytes = self._materialise(command.token)
        if is_stored:
            report = self._load_version(command)
            self._backend.after_load(report.parts)
            measured = _plain(report)
            measured["prefetched_bytes"] = report.prefetched_bytes
            measured["prefetch_s"] = report.prefetch_s
            base_bytes = self._borrow_base(command.token) if base_bytes is None else base_bytes
        if base_bytes is not None:
            measured["base_bytes_filled"] = base_bytes
        self.is_resident = True
        return measured

    def _lay_out(self, token: int) -> None:
        nbytes = self._backend.lay_out_bytes
        if self._device.uuid and nbytes:
            request = MakeRoom(
                device_uuid=self._device.uuid, group=self._group, token=token, nbytes=nbytes
            )
            # Ranks of one engine start it together, or none does.
            gather = self._backend.gather_at_start
            on_all_ranks(gather, lambda: str(self._client.request(request)))
        before = self._taken_elsewhere()
        self._backend.lay_out()
        self._outside_bytes = max(0, self._taken_elsewhere() - before)
        # The arena takes the place of what was allocated: later loads need no memory for both.
        self._device.take_peak_bytes()
        self._is_laid_out = True

    def _taken_elsewhere(self) -> int:
        """Memory of the device that the framework's allocator has not, up to a constant. While a
        group's lock is held, no other member takes or frees any."""
        free_bytes = self._device.free_bytes()
        return 0 if free_bytes is None else -free_bytes - self._device.kept_bytes()

    def _use(self) -> DeviceUse:
        """The device memory that will be used besides the arena."""
        # What the allocator still has is not free, and is not allocated again.
        working_bytes = max(0, self._peak_bytes - self._device.kept_bytes())
        base = self._backend.frozen_base
        if base is None:
            return DeviceUse(working_bytes=working_bytes)
        return DeviceUse(
            working_bytes=working_bytes, base_bytes=base.arena.nbytes, base_content=base.content
        )

    def _materialise(self, token: int) -> int | None:
        """Get memory for the arenas, then write the initial weights; returns as `_borrow_base`."""
        self._register(token)
        self._client.attach()
        base_bytes = self._borrow_base(token)
        try:
            self._backend.materialise()
            # A version that is loaded next is written by another process.
            self._device.wait()
        except BaseException:
            self._client.give_back()
            raise
        # Copies of the start are not made again: later loads need no memory for them.
        self._device.take_peak_bytes()
        self._is_materialised = True
        return base_bytes

    def _borrow_base(self, token: int) -> int | None:
        """Map the shared frozen weights to the device; returns the bytes that had to be filled.
        None: the backend has no frozen weights. Raises as `StateManagerClient.borrow_base`."""
        base = self._backend.frozen_base
        if base is None:
            return None

        def fill() -> None:
            base.fill()
            # Other processes read it next.
            self._device.wait()

        return self._client.borrow_base(base.arena, content=base.content, token=token, fill=fill)

    def _load_version(self, command: Load) -> LoadReport:
        """Load into the arena. The arena is registered once per process; with host memory, at every
        load."""
        if self._backend.host_arena is None and self._backend.slices() == self._registered:
            try:
                return self._load_stored(command)
            except ConflictError as error:
                LOG.info("registering the arena again: %s", error)
        self._register(command.token)
        return self._load_stored(command)

    def _load_stored(self, command: Load) -> LoadReport:
        return self._client.load(
            seq=command.seq,
            token=command.token,
            previous_seq=command.previous_seq,
            base_seq=command.base_seq,
        )

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

    def _offload(self, command: Offload) -> RunResult:
        self._backend.before_offload()
        parts = self._backend.live_parts()
        digests = self._replicas.of_state(parts, command.seq)
        trainer_step = self._backend.trainer_step
        self._device.free_cached()
        before = self._memory()
        report = self._client.offload(command.save, parts=parts, digests=digests)
        self._offloaded_step = trainer_step
        self.is_resident = False
        self._was_offloaded = True
        # A small amount is kept for the next operation: returning it at every switch made that
        # operation a third slower, as measured.
        trim_heap(HEAP_KEPT_BYTES)
        return {**_plain(report), "memory_before": before, "memory_after": self._memory()}

    def _memory(self) -> dict[str, int]:
        arena = self._backend.arena
        found = {
            "arena_bytes": arena.resident_bytes(),
            # Returned memory is the StateManager's, even where it is still mapped.
            "rss_bytes": rss_bytes() - arena.returned_bytes(),
        }
        free_bytes = self._device.free_bytes()
        return found if free_bytes is None else {**found, "device_free_bytes": free_bytes}


def rss_bytes() -> int:
    """Resident memory of this process, including shared pages."""
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def _plain(report: MoveReport) -> RunResult:
    return {
        "bytes_moved": report.bytes_moved,
        "seconds": report.seconds,
        "tier": report.tier,
    }
