"""What the ranks of a tensor-parallel vLLM run: functions that a spawned process finds by name."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from plexrl.errors import StaleWeightsError
from plexrl.model.deployment_spec import deployment_spec_from_json
from plexrl.worker.models import named_parameters
from plexrl.worker.process.backend_factory import make_backend
from plexrl.worker.state.arena_tensors import view
from tests.worker.rollout.engine.engine_ranks import follow
from tests.worker.rollout.vllm.backends import generate, trained

SEEDS = (11, 12)


def write_boxes(backend: Any, model: Any) -> None:
    """Replace this rank's weights, as a pull does."""
    new = dict(named_parameters(model))
    for piece in backend.slices():
        box = tuple(
            slice(first, first + extent)
            for first, extent in zip(piece.offset, piece.shape, strict=True)
        )
        view(backend.arena, piece).copy_(new[piece.key.name].data[box])


def run(rank: int, ranks: int, spec_json: str, family: str, folder: str) -> None:
    """Generate with the first weights, with two versions of new ones, and after an offload; then
    have one rank compute with other weights. The leader leaves `found.pt`."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", ranks)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    spec = deployment_spec_from_json(spec_json)
    backend: Any = make_backend(spec, rank, ranks, Path(folder))
    backend.lay_out()
    backend.materialise()
    found: dict[str, Any] = {"rows": []}

    def draw() -> None:
        if rank:
            follow(backend.engine, backend.ranks, lambda: None)
        else:
            found["rows"].append(generate(backend, 0, n=3))
            backend.calls.send("close")

    draw()
    for seq, seed in enumerate(SEEDS, 1):
        write_boxes(backend, trained(family, seed))
        backend.after_pull(seq=seq, trainer_step=0)
        draw()
    backend.before_offload()
    found["held"] = backend.engine.cache_bytes_held
    backend.after_load(frozenset())
    draw()
    found["stats"] = backend.stats()
    if rank == ranks - 1:
        parameter = next(backend.engine.model.parameters())
        parameter.data = parameter.data + 1.0
    backend.after_pull(seq=3, trainer_step=0)
    try:
        draw()
    except StaleWeightsError as error:
        found["refusal"] = error.message
    found["arena_bytes"] = sum(piece.nbytes for piece in backend.slices())
    found["copied"] = backend.engine.weights.bytes_copied
    torch.save(found, Path(folder) / f"rank{rank}.pt")
    dist.barrier()
    # The process ends here: vLLM's groups end with it.
