"""What a rank of DeepSpeed's own tests runs, in a process of its own."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils import cpp_extension

from plexrl.errors import InvalidRequestError
from plexrl.worker.batches.logprobs import Wanted
from plexrl.worker.batches.packing import micro_batches
from plexrl.worker.training.deepspeed import DeepSpeedModel
from plexrl.worker.training.deepspeed.cpu_adam import CpuAdam
from plexrl.worker.training.model import TrainingRank
from tests.worker.training.cases import Case
from tests.worker.training.ranks import batch


def without_a_compiler(_rank: int, folder: str) -> None:
    """ZeRO-2 does all it has to with no command on the path; CPUAdam says what it lacks."""
    os.environ["PATH"] = ""
    os.environ["TORCH_EXTENSIONS_DIR"] = folder
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 1)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    model = DeepSpeedModel(TrainingRank(spec=Case(backend="deepspeed").spec, rank=0))
    model.lay_out()
    model.materialise()
    frees_what_is_derived(model)
    assert {path.name for path in Path(folder).iterdir()} == {"store"}, "nothing was compiled"
    host = Case(backend="deepspeed", options=(("optimizer", "host"),))
    said = ""
    try:
        DeepSpeedModel(TrainingRank(spec=host.spec, rank=0)).lay_out()
    except InvalidRequestError as error:
        said = error.message
    assert "install a C++ compiler and ninja" in said, said
    # Gloo's threads now and then abort an interpreter that unwinds round them.
    os._exit(0)


def frees_what_is_derived(model: DeepSpeedModel) -> None:
    """Between an offload and the next use the model's parameters take no memory."""
    batches = micro_batches(batch(0), 1)
    (first,) = model.forward(batches, Wanted())
    weights = [parameter.untyped_storage() for parameter in model._model.parameters()]
    assert all(storage.size() for storage in weights)
    model.before_offload()
    assert not any(storage.size() for storage in weights)
    model.after_load(gradients_loaded=False)
    assert not any(storage.size() for storage in weights)
    (second,) = model.forward(batches, Wanted())
    assert torch.equal(first["logprobs"], second["logprobs"])


def after_a_killed_compilation(_rank: int) -> None:
    """Load CPUAdam in spite of the lock that a process left which was killed while it compiled."""
    folder = Path(cpp_extension._get_build_directory("cpu_adam", verbose=False))
    (folder / "lock").touch()
    CpuAdam()
    assert not (folder / "lock").exists()
