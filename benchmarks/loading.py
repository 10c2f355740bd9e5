"""Compares the host memory of ranks that read their shards of a model with ranks that read all.

    python -m benchmarks.loading [--quick]

Four `fsdp` ranks of a 2 GB model (float32) in safetensors files: a dense one, and one with experts,
which its files hold one by one. For each rank, the peak of its memory while the model is loaded,
less what it had before (`VmHWM`), divided by the size of its shard of the parameters. For
comparison, ranks that build the whole model and then keep their shard.
"""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.report import report
from benchmarks.sizes import sized
from plexrl.model.deployment_spec import DeploymentSpec
from plexrl.model.spec import ModelSpec, tiny_qwen2
from plexrl.statemanager.layout.keys import StatePart
from plexrl.worker.models import build_model, lay_out_model, named_parameters
from plexrl.worker.training.fsdp.model import FsdpModel
from plexrl.worker.training.model import TrainingRank

RANKS = 4
SIZES = sized(
    {"hidden": 1024, "layers": 38, "vocabulary": 32_000},
    quick={"hidden": 256, "layers": 4, "vocabulary": 2_000},
)
EXPERTS = 16
"""Each as wide as its share of the dense model's MLP, so that both models have equal sizes."""


def write_model(rank: int, folder: str, architecture: str) -> None:
    """Write a model with random weights; in a process of its own, whose memory ends with it."""
    del rank
    base = tiny_qwen2("0123456789", seed=1)
    hidden = SIZES["hidden"]
    config = {
        **base.config,
        "hidden_size": hidden,
        "intermediate_size": hidden * 11 // 4,
        "num_hidden_layers": SIZES["layers"],
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 64,
        "vocab_size": SIZES["vocabulary"],
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": hidden * 11 // 4 // EXPERTS // 8 * 8,
    }
    model: Any = build_model(ModelSpec(architecture=architecture, config_json=json.dumps(config)))
    model.save_pretrained(folder, max_shard_size="500MB")


def load(rank: int, folder: str, scratch: str, whole: bool) -> None:
    """Load on one rank; leaves its peak and the size of its shard, in bytes."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{scratch}/store", RANKS)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    spec = DeploymentSpec(model=ModelSpec(path=folder), kind="train", backend="fsdp", workers=RANKS)
    model = FsdpModel(TrainingRank(spec=spec, rank=rank))
    # Libraries are loaded at their first use.
    lay_out_model(tiny_qwen2("0123456789")).read("model.norm.weight", (slice(None),))
    build_model(tiny_qwen2("0123456789"))
    before = _restart_peak()
    if whole:
        named = dict(named_parameters(build_model(spec.model)))
        shards = [each.data[rank::RANKS].clone() for each in named.values()]
        shard_bytes = sum(each.nbytes for each in shards)
    else:
        model.lay_out()
        model.materialise()
        shard_bytes = sum(
            piece.nbytes for piece in model.slices() if piece.key.part == StatePart.PARAMETER
        )
    peak = _memory("VmHWM") - before
    Path(f"{scratch}/{rank}").write_text(f"{peak} {shard_bytes}")
    dist.barrier()
    dist.destroy_process_group()


def _restart_peak() -> int:
    """Let the kernel measure the peak from now on; returns the present memory in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return _memory("VmRSS")


def _memory(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"the kernel does not say {name}")


def measured(folder: str, *, whole: bool) -> list[tuple[int, int]]:
    """(peak, shard) of each rank, in bytes."""
    with tempfile.TemporaryDirectory() as scratch:
        _start(load, RANKS, folder, scratch, whole)
        rows = [(Path(scratch) / str(rank)).read_text().split() for rank in range(RANKS)]
    return [(int(peak), int(shard)) for peak, shard in rows]


def _start(function: Any, ranks: int, *arguments: Any) -> None:
    mp.start_processes(  # type: ignore[attr-defined, no-untyped-call]
        function, args=arguments, nprocs=ranks, start_method="spawn"
    )


def main() -> None:
    """Measure and print."""
    rows, figures = [], {}
    for architecture, prefix in (("qwen2", ""), ("qwen3_moe", "moe_")):
        folder = tempfile.mkdtemp(prefix="plexrl-loading-")
        try:
            _start(write_model, 1, folder, architecture)
            boxes, all_of_it = measured(folder, whole=False), measured(folder, whole=True)
        finally:
            shutil.rmtree(folder)
        size = f"{architecture}, {sum(s for _, s in boxes) / 1e9:.2f} GB"
        for name, found in (("own boxes", boxes), ("whole model", all_of_it)):
            ratio = max(peak / shard for peak, shard in found)
            rows.append([size, name, f"{max(p for p, _ in found) / 1e6:.0f} MB", f"{ratio:.2f}"])
            figures[f"{prefix}{name.split()[0]}_peak_over_shard"] = ratio
    report(
        f"host memory while {RANKS} ranks load a model",
        ["model", "each rank reads", "peak", "peak / shard"],
        rows,
        figures,
    )


if __name__ == "__main__":
    main()
