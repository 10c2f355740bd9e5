"""What the ranks of a case compute with steps of the stored state, or under the lock."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from plexrl.errors import ConflictError, PlexRLError, StateLostError
from plexrl.statemanager.client.client import StateManagerClient
from plexrl.statemanager.layout.keys import StatePart
from plexrl.statemanager.protocol.ticket_key import read_ticket_key
from plexrl.statemanager.protocol.tickets import Claims, TicketRole
from plexrl.wire.messages import SaveRequest
from plexrl.wire.operations import AdamParams, OperationKind
from plexrl.wire.tensors import Arrays
from plexrl.worker.interface.backend import BackendCall, BackendResult
from plexrl.worker.process.backend_factory import make_backend
from plexrl.worker.state.arena_tensors import view
from plexrl.worker.state.state_mover import StateMover
from plexrl.worker.training.backend import TrainingBackend
from tests.wire.runs import make_run
from tests.worker.state.host_optimizer_ranks import contents
from tests.worker.training.cases import Case
from tests.worker.training.deferred_ranks import DeferredRank
from tests.worker.training.ranks import batch, inputs_of, loss_of

STEPS = 3
NAN_STEP = 1
"""Of this step the gradients are not finite."""
ADAM = AdamParams(learning_rate=1e-2, grad_clip_norm=0.05, weight_decay=0.1)

Record = list[tuple[dict[str, bytes], dict[str, Any]]]
"""By step: parameters and optimizer state after it, and its result."""


def launch(case: Case, way: str, folder: Path, listen: str) -> list[Record]:
    """What each rank has after each step. `way`: how the steps are made."""
    mp.start_processes(  # type: ignore[attr-defined, no-untyped-call]
        run,
        args=(case, way, str(folder), listen),
        nprocs=case.layout.world_size,
        start_method="forkserver",
    )
    ranks = range(case.layout.world_size)
    return [torch.load(folder / f"{way}.{rank}.pt", weights_only=False) for rank in ranks]


class StoredRank(DeferredRank):
    """One rank of a case, and its StateManager, which gives it memory."""

    def __init__(self, case: Case, name: str, rank: int, folder: Path, listen: str) -> None:
        self.case, self.rank = case, rank
        self.backend = self.trains = training_backend(case, rank, folder)
        claims = Claims(
            role=TicketRole.WORKER,
            job="j",
            deployment=f"j/{name}",
            rank=rank,
            world_size=case.layout.world_size,
            group=name,
        )
        self.client = StateManagerClient(
            listen,
            deployment=f"j/{name}",
            rank=rank,
            world_size=case.layout.world_size,
            ticket=read_ticket_key(folder / "nvme" / "ticket.key").mint(claims),
            timeout_s=60.0,
        )
        self.mover = StateMover(self.backend, self.client, name)
        self.seq = 0
        self.load()

    def load(self) -> None:
        self.mover.move(make_run(OperationKind.LOAD, seq=self.seq))

    def offload(self) -> None:
        self.mover.move(make_run(OperationKind.OFFLOAD, seq=self.seq, keep_seq=self.seq))

    def backward(self, arrays: Arrays, *, spoils: bool) -> None:
        self.gradients(inputs_of(self.case, arrays), loss_of(self.case))
        if spoils:
            pieces = [each for each in self.backend.slices() if each.key.part == StatePart.GRADIENT]
            view(self.backend.arena, pieces[0]).fill_(float("inf"))
        self.seq += 1

    def step_loaded(self) -> BackendResult:
        self.load()
        self.seq += 1
        return self.backend.run(step_call(self.seq))

    def step_stored(self) -> BackendResult:
        self.seq += 1
        order = SaveRequest(seq=self.seq, token=1, keep_seq=self.seq - 1)
        result = self.mover.step_stored(step_call(self.seq), order)
        self.load()
        return result


def training_backend(case: Case, rank: int, folder: Path) -> TrainingBackend:
    made = make_backend(case.spec, rank, case.layout.world_size, folder)
    assert isinstance(made, TrainingBackend)
    return made


def step_call(seq: int) -> BackendCall:
    return BackendCall(
        operation="o", kind=OperationKind.OPTIM_STEP, params=ADAM, arrays={}, seq=seq
    )


def run(rank: int, case: Case, way: str, folder: str, listen: str) -> None:
    """All of one rank."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{folder}/{way}", case.layout.world_size),  # type: ignore[attr-defined]
        rank=rank,
        world_size=case.layout.world_size,
    )
    own = StoredRank(case, way, rank, Path(folder), listen)
    record: Record = []
    for step in range(STEPS):
        own.backward(batch(step), spoils=step == NAN_STEP and rank == 0)
        own.offload()
        if way == "refused":
            refused(own)
        if way == "unsaved":
            unsaved(own)
        result = own.step_stored() if way == "stored" else own.step_loaded()
        record.append((contents(own.trains), result.result))
    assert (max(priorities()) > min(priorities())) == (way in ("stored", "unsaved"))
    torch.save(record, f"{folder}/{way}.{rank}.pt")
    own.client.close()
    dist.barrier()
    # Gloo's threads now and then abort an interpreter that unwinds round them.
    os._exit(0)


def refused(own: StoredRank) -> None:
    """The last rank has not offloaded this version, so no rank steps."""
    client, seq = own.client, own.seq
    if own.rank == own.case.layout.world_size - 1:
        client._offloaded = None
    order = SaveRequest(seq=seq + 1, token=1, keep_seq=seq)
    try:
        own.mover.step_stored(step_call(seq + 1), order)
    except PlexRLError:
        return
    raise AssertionError("a rank stepped alone")


def unsaved(own: StoredRank) -> None:
    """The last rank stores no version, so that of the first one is dropped."""
    is_last = own.rank == own.case.layout.world_size - 1
    order = SaveRequest(seq=own.seq + 1, token=0 if is_last else 1, keep_seq=own.seq)
    with pytest.raises(ConflictError, match="stale"):
        own.mover.step_stored(step_call(own.seq + 1), order)
    own.mover._register(1)
    with pytest.raises(StateLostError):
        own.client.load(seq=own.seq + 1, token=1, previous_seq=0, base_seq=0)


def priorities() -> list[int]:
    """Nice values of this process's threads."""
    threads = Path("/proc/self/task").iterdir()
    return [os.getpriority(os.PRIO_PROCESS, int(thread.name)) for thread in threads]
