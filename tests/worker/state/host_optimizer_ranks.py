"""What the ranks of the host optimizer's tests run."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from plexrl.statemanager.client.client import StateManagerClient
from plexrl.statemanager.layout.keys import StatePart
from plexrl.statemanager.protocol.host_requests import host_start
from plexrl.statemanager.protocol.ticket_key import read_ticket_key
from plexrl.statemanager.protocol.tickets import Claims, Role
from plexrl.wire.messages import SaveRequest
from plexrl.wire.operations import CheckpointParams, OperationKind
from plexrl.worker.state.save_checkpoint import save_checkpoint
from plexrl.worker.training.backend import TrainingBackend
from tests.wire.runs import make_run
from tests.worker.arena_memory import memory_of
from tests.worker.state.host_optimizer_batches import (
    LOSS,
    backend,
    backward,
    batch,
    call,
    leave,
    part,
    step,
)

STEPS = 9


class Rank:
    """A backend and its StateManager, as a worker process has them."""

    def __init__(
        self, name: str, rank: int, ranks: int, folder: str, statemanager: str, optimizer: str
    ) -> None:
        self.made = backend(rank, ranks, Path(folder), optimizer)
        claims = Claims(
            role=Role.WORKER,
            job="j",
            deployment=f"j/{name}",
            rank=rank,
            world_size=ranks,
            group=name,
        )
        self.client = StateManagerClient(
            statemanager,
            deployment=f"j/{name}",
            rank=rank,
            world_size=ranks,
            ticket=read_ticket_key(Path(folder) / "nvme" / "ticket.key").mint(claims),
            timeout_s=60.0,
        )
        self.group = name
        self.register()

    def register(self) -> None:
        self.client.register(
            self.made.arena,
            self.made.slices(),
            group=self.group,
            token=1,
            host=self.made.host_arena,
        )

    def switch(self, seq: int) -> tuple[int, int]:
        """Out and in again; returns what was moved either way."""
        self.made.before_offload()
        order = SaveRequest(seq=seq, keep_seq=seq - 1, token=1)
        out = self.client.offload(order, parts=self.made.live_parts())
        self.register()
        loaded = self.client.load(seq=seq, token=1)
        self.made.after_load(loaded.parts)
        return out.bytes_moved, loaded.bytes_moved

    def snapshot(self, seq: int) -> int:
        parts = self.made.live_parts()
        order = SaveRequest(seq=seq, keep_seq=seq - 1, token=1)
        return self.client.snapshot(order, parts=parts).bytes_moved


def contents(made: TrainingBackend) -> dict[str, bytes]:
    """Every slice of parameters and optimizer state."""
    found = {}
    for piece in made.slices():
        if piece.key.part == StatePart.GRADIENT:
            continue
        if piece.arena_offset < host_start(made.arena.nbytes):
            data = memory_of(made.arena)[piece.arena_offset : piece.arena_offset + piece.nbytes]
        else:
            assert made.host_arena is not None
            first = piece.arena_offset - host_start(made.arena.nbytes)
            data = made.host_arena.buffer[first : first + piece.nbytes]
        found[f"{piece.key.part}/{piece.key.name}"] = bytes(data)
    return found


def join(rank: int, ranks: int, store: str) -> None:
    """Be one of a process group."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, ranks),  # type: ignore[attr-defined]
        rank=rank,
        world_size=ranks,
    )


def train_alike(rank: int, ranks: int, store: str, folder: str, statemanager: str) -> None:
    """Both kinds of optimizer on the same batches, with switches at different times."""
    join(rank, ranks, store)
    on_device = Rank("device", rank, ranks, folder, statemanager, "device")
    in_host = Rank("host", rank, ranks, folder, statemanager, "host")
    moved: dict[str, list[Any]] = {"device": [], "host": []}
    for index in range(STEPS):
        for each in (on_device, in_host):
            arrays = batch(index)
            backward(each.made, part(arrays, rank, ranks), LOSS, len(arrays["lengths"]))
        norms = [step(each.made) for each in (on_device, in_host)]
        assert norms[0] == norms[1]
        assert contents(on_device.made) == contents(in_host.made)
        if index % 3 == 1:
            in_host.snapshot(index + 1)
        if index % 2 == 1:
            for each in (on_device, in_host):
                moved[each.group].append(each.switch(index + 1))
            assert contents(on_device.made) == contents(in_host.made)
    # Another switch without a step between moves no optimizer state either.
    moved["host"].append(in_host.switch(STEPS))
    for out, back in moved["host"]:
        assert 3 * out <= moved["device"][0][0] + 4096, moved
        assert 3 * back <= moved["device"][0][1] + 4096, moved
    params = CheckpointParams(name="host", overwrite=True)
    save = make_run(OperationKind.SAVE_CHECKPOINT, seq=STEPS, params=params)
    save_checkpoint(in_host.made, in_host.client, save)
    np.save(f"{folder}/wanted{rank}.npy", np.array(contents(in_host.made), dtype=object))
    in_host.client.close()
    leave()


def restore(rank: int, ranks: int, store: str, folder: str, statemanager: str) -> None:
    """Both kinds of optimizer load a checkpoint, and training continues identically."""
    join(rank, ranks, store)
    wanted = np.load(f"{folder}/wanted{rank}.npy", allow_pickle=True).item()
    both = [Rank(kind, rank, ranks, folder, statemanager, kind) for kind in ("device", "host")]
    both[1].snapshot(1)
    for each in both:
        params = CheckpointParams(name="host")
        each.made.run(call(OperationKind.LOAD_CHECKPOINT, params, {}, job="j"))
        assert contents(each.made) == wanted
    arrays = batch(77)
    for each in both:
        backward(each.made, part(arrays, rank, ranks), LOSS, len(arrays["lengths"]))
        step(each.made)
    assert contents(both[0].made) == contents(both[1].made) != wanted
    # Without the optimizer's state its moments start at zero.
    params = CheckpointParams(name="host", optimizer=False)
    both[1].snapshot(3)
    both[1].made.run(call(OperationKind.LOAD_CHECKPOINT, params, {}, job="j"))
    left = contents(both[1].made)
    assert not any(any(data) for key, data in left.items() if key.startswith("optimizer"))
    leave()
