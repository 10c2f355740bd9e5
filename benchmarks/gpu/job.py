"""A process that acts as a job's worker on a GPU, with one arena of verifiable contents."""

import ctypes
import random
import time
from multiprocessing.connection import Connection
from pathlib import Path

from plexrl.errors import PlexRLError
from plexrl.statemanager.client.client import StateManagerClient
from plexrl.statemanager.device.cuda.arena import CudaArena
from plexrl.statemanager.device.cuda.bindings import BoundDriver
from plexrl.statemanager.device.cuda.driver import CudaDriver
from plexrl.statemanager.layout.keys import StateKey, StatePart, StateSlice
from plexrl.statemanager.protocol.messages import DeviceUse
from plexrl.statemanager.protocol.ticket_key import read_ticket_key
from plexrl.statemanager.protocol.tickets import Claims, Role, TicketKey
from plexrl.wire.messages import SaveRequest

BLOCK_BYTES = 64 << 20
SAMPLES = 64
SAMPLE_BYTES = 4096

Reply = tuple[str, float, int]
"""Error (empty: none), seconds that the client's call took, bytes that were moved."""

Version = tuple[str, int]
"""Deployment and sequence number."""


class GpuJob:
    """An arena of `nbytes`, filled with one random block over and over."""

    def __init__(
        self, driver: CudaDriver, listen: str, key: TicketKey, name: str, nbytes: int
    ) -> None:
        self._driver = driver
        self._arena = CudaArena(driver, nbytes)
        self._stream = self._driver.create_stream()
        self._nbytes = nbytes
        self._block = random.Random(name).randbytes(min(BLOCK_BYTES, nbytes))
        claims = Claims(role=Role.WORKER, job=name, deployment=f"{name}/actor")
        self._client = StateManagerClient(
            listen,
            deployment=claims.deployment,
            rank=claims.rank,
            world_size=claims.world_size,
            ticket=key.mint(claims),
        )
        self._slices = (
            StateSlice(
                key=StateKey(part=StatePart.PARAMETER, name="w"),
                dtype="U8",
                global_shape=(nbytes,),
                offset=(0,),
                shape=(nbytes,),
                arena_offset=0,
            ),
        )

    def fill(self) -> None:
        """Register the arena, and write what `check` expects."""
        self._client.register(self._arena, self._slices, group=f"gpu{self._arena.device}", token=1)
        source = ctypes.create_string_buffer(self._block, len(self._block))
        for start in range(0, self._nbytes, len(self._block)):
            count = min(len(self._block), self._nbytes - start)
            address = self._arena.address + start
            host = ctypes.addressof(source)
            self._driver.copy_to_device(address, host, count, self._stream)
        self._driver.synchronize_stream(self._stream)

    def offload(self, seq: int, successor: Version = ("", 0)) -> int:
        """Bytes that were moved; the version's predecessor is dropped. `successor`: what is loaded
        next."""
        report = self._client.offload(
            SaveRequest(
                seq=seq,
                keep_seq=seq,
                token=1,
                successor=successor[0],
                successor_seq=successor[1],
            ),
            parts=frozenset({StatePart.PARAMETER}),
        )
        return report.bytes_moved

    def close(self) -> None:
        """Release all resources."""
        self._client.close()
        self._arena.close()
        self._driver.destroy_stream(self._stream)

    def load(self, seq: int) -> int:
        """Bytes that were moved, without those that were there already."""
        report = self._client.load(seq=seq, token=1)
        return report.bytes_moved - report.prefetched_bytes

    def expect_use(self, nbytes: int) -> None:
        """Announce memory that a framework will allocate beside the arena."""
        self._client.expect_use(DeviceUse(working_bytes=nbytes))

    def check(self, seed: int) -> None:
        """Compare samples, the ends among them, with what `fill` wrote.

        Raises:
            PlexRLError: one differs.
        """
        chance = random.Random(seed)
        last = self._nbytes - SAMPLE_BYTES
        places = [0, last, *(chance.randrange(last) for _ in range(SAMPLES))]
        target = ctypes.create_string_buffer(SAMPLE_BYTES)
        for place in places:
            host = ctypes.addressof(target)
            address = self._arena.address + place
            self._driver.copy_to_host(host, address, SAMPLE_BYTES, self._stream)
            self._driver.synchronize_stream(self._stream)
            at = place % len(self._block)
            expected = self._block[at : at + SAMPLE_BYTES]
            expected += self._block[: SAMPLE_BYTES - len(expected)]
            if target.raw != expected:
                raise PlexRLError(f"bytes from {place} on are not what was written")


def serve_job(pipe: Connection, listen: str, key_file: str, name: str, nbytes: int) -> None:
    """A process that does with an arena on device 0 what the pipe says."""
    serve(pipe, GpuJob(BoundDriver(), listen, read_ticket_key(Path(key_file)), name, nbytes))


def serve(pipe: Connection, job: GpuJob) -> None:
    """Execute the actions (action, seq, successor) from the pipe until `end`."""
    while True:
        action, seq, successor = pipe.recv()
        started = time.perf_counter()
        error, moved = "", 0
        try:
            match action:
                case "fill":
                    job.fill()
                case "offload":
                    moved = job.offload(seq, successor)
                case "load":
                    moved = job.load(seq)
                case "check":
                    job.check(seq)
                case _:
                    return
        except PlexRLError as failure:
            error = str(failure)
        pipe.send((error, time.perf_counter() - started, moved))
