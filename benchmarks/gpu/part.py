"""What the benchmarks of models have in common: a device, a StateManager, and backends on both."""

import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.sizes import sized
from plexrl.errors import DeviceUnavailableError
from plexrl.model.deployment_spec import DeploymentSpec
from plexrl.model.spec import ModelSpec, tiny_qwen2
from plexrl.statemanager.client.client import StateManagerClient
from plexrl.statemanager.config import StateManagerConfig
from plexrl.statemanager.device.backend import DeviceKind
from plexrl.statemanager.device.cuda.bindings import BoundDriver
from plexrl.statemanager.device.cuda.driver import CudaDriver
from plexrl.statemanager.protocol.ticket_key import read_ticket_key
from plexrl.statemanager.protocol.tickets import Claims, TicketRole
from plexrl.wire.messages import RUNS, RankShare
from plexrl.wire.operations import OperationKind
from plexrl.wire.tensors import Arrays
from plexrl.worker.interface.backend import Backend, BackendCall
from plexrl.worker.process.backend_factory import make_backend
from plexrl.worker.state.device import WorkerDevice, open_device
from plexrl.worker.state.state_mover import StateMover

STARTED = time.monotonic()
SIZES = sized(
    {
        "hidden_size": 1536,
        "intermediate_size": 6144,
        "num_hidden_layers": 5,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "max_position_embeddings": 512,
    },
    quick={},
)


def random_model(vocabulary: str, seed: int) -> ModelSpec:
    """A model of 190 million parameters."""
    small = tiny_qwen2(vocabulary, seed=seed)
    return dataclasses.replace(small, config_json=json.dumps({**small.config, **SIZES}))


def note(what: str) -> None:
    """Say on standard error how far a benchmark is. If it is stopped, nothing else tells."""
    sys.stderr.write(f"{time.monotonic() - STARTED:6.1f} s: {what}\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The device of this process, as workers and StateManagers name it."""

    device: WorkerDevice
    driver: CudaDriver | None
    """None: the CPU."""

    @property
    def kind(self) -> DeviceKind:
        """For the StateManager."""
        return DeviceKind.CPU if self.driver is None else DeviceKind.CUDA


@contextmanager
def open_place(*, cpu: bool) -> Iterator[Place]:
    """The first GPU, or with `cpu` none, and a process group of one rank.

    Raises:
        DeviceUnavailableError: there is no GPU.
    """
    driver = None if cpu else BoundDriver()
    uuids = ("",) if driver is None else driver.uuids()
    if not uuids:
        raise DeviceUnavailableError("the driver shows no GPU: see CUDA_VISIBLE_DEVICES")
    # cuBLAS is deterministic only with a workspace of its own. It reads this when it starts.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    device = open_device(uuids[0])
    import torch.distributed as dist

    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)  # type: ignore[attr-defined]
        dist.init_process_group(device.collectives, store=store, rank=0, world_size=1)
        yield Place(device=device, driver=driver)
        dist.destroy_process_group()


class Part:
    """A trainer or a rollout: a backend, and the moves of its state."""

    def __init__(
        self, spec: DeploymentSpec, job: str, node: StateManagerConfig, device: WorkerDevice
    ) -> None:
        self.backend: Backend = make_backend(spec, 0, 1, Path("/nowhere"), device)
        claims = Claims(role=TicketRole.WORKER, job=job, deployment=f"{job}/{spec.kind}")
        key = read_ticket_key(node.ticket_key_path)
        self.client = StateManagerClient(
            node.listen,
            deployment=claims.deployment,
            rank=0,
            world_size=1,
            ticket=key.mint(claims),
        )
        self.mover = StateMover(self.backend, self.client, "group", device)
        self.seq = 0

    @property
    def state_bytes(self) -> int:
        """Of what is moved."""
        return sum(piece.nbytes for piece in self.backend.slices())

    def move(self, kind: OperationKind, **fields: Any) -> dict[str, Any]:
        """Carry out a move of the present version."""
        return self.mover.move(move_message(kind, self.seq, **fields))

    def run(self, kind: OperationKind, params: object, arrays: Arrays, **rank: Any) -> Any:
        """The result of an operation that writes to the state."""
        found = self.backend.run(backend_call(kind, params, arrays, self.seq, **rank))
        self.mover.written()
        return found

    def close(self) -> None:
        """Release all resources."""
        self.client.close()
        self.backend.arena.close()


def backend_call(
    kind: OperationKind, params: object, arrays: Arrays, seq: int, **rank: Any
) -> BackendCall:
    """A call of the only rank."""
    return BackendCall(
        operation="o", kind=kind, params=params, share=RankShare(**rank), arrays=arrays, seq=seq
    )


def move_message(kind: OperationKind, seq: int, **fields: Any) -> Any:
    """The order of a move of version `seq`, after which no other version is kept."""
    kept = {"keep_seq": seq} if kind in (OperationKind.OFFLOAD, OperationKind.SNAPSHOT) else {}
    if kind not in (OperationKind.PUBLISH, OperationKind.SYNC_WEIGHTS):
        kept["previous_seq"] = 0
    made: Any = next(each for each in RUNS if each.kind is kind)
    head = ("o", "deployment", "job", "group", 1, seq, (), 1, False)
    return made(*head, **kept, **fields)
