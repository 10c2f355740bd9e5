"""New weights in place: vLLM's logprobs are the trainer's after every one, or it refuses."""

import copy
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from plexrl.errors import StaleWeightsError
from plexrl.model.lora import LoraSpec, adapter_names
from plexrl.wire.operations import CheckpointParams, OperationKind
from plexrl.worker.interface.backend import BackendCall
from plexrl.worker.state.arena_tensors import view
from tests.worker.arena_memory import memory_of
from tests.worker.rollout.vllm.backends import (
    MARKS,
    call,
    finish,
    generate,
    largest_error,
    pulled,
    trained,
    write,
)
from tests.worker.rollout.vllm.conftest import Make

pytestmark = MARKS

OLD, NEW = trained("qwen2", 2), trained("qwen2", 5)
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.05}
"""Error of a logprob against `transformers` in the same dtype, for logits of order 1."""


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("qwen2", "float32"), ("qwen2", "bfloat16"), ("llama", "float32"), ("qwen3", "float32")],
)
def test_after_every_update_logprobs_are_the_trainers(make: Make, family: str, dtype: str) -> None:
    backend = make(family, dtype=dtype)
    former: Any = None
    for seed in (11, 12, 13):
        model = trained(family, seed, dtype)
        write(backend, model)
        pulled(backend)
        found = generate(backend, 0, n=3)
        assert largest_error(found, model) < TOLERANCE[dtype]
        if former is not None:
            assert largest_error(found, former) > 10 * TOLERANCE[dtype]
        former = model


def test_pulled_adapters_are_merged_into_what_vllm_computes_with(make: Make) -> None:
    lora = LoraSpec(rank=4)
    backend = make(lora=lora)
    generator = torch.Generator().manual_seed(6)
    adapters = {}
    for piece in backend.pulled_slices():
        adapters[piece.key.name] = torch.randn(piece.shape, generator=generator) * 0.2
        view(backend.arena, piece).copy_(adapters[piece.key.name])
    pulled(backend)
    merged = copy.deepcopy(OLD)
    for name, module in merged.named_modules():
        if name.rpartition(".")[2] in lora.targets:
            down, up = (adapters[each] for each in adapter_names(name))
            module.weight.data += lora.scale * (up @ down)
    found = generate(backend, 0)
    assert largest_error(found, merged) < 1e-4
    assert largest_error(found, OLD) > 1e-2


def test_no_weight_is_held_twice(make: Make) -> None:
    for family in ("qwen2", "llama"):
        assert make(family).engine.weights.bytes_copied == 0


@pytest.mark.parametrize("recompute_kv", [True, False])
def test_running_rows_continue_with_the_new_weights(make: Make, recompute_kv: bool) -> None:
    backend = make()
    write(backend, OLD)
    pulled(backend)
    backend.submit(call("g", 7, max_tokens=12), None)
    for _ in range(5):
        backend.step()
    seq = backend.stats().weights_seq
    backend.pause(recompute_kv=recompute_kv)
    write(backend, NEW)
    pulled(backend)
    backend.resume()
    backend.submit(call("late", seq + 1, max_tokens=12), None)
    found = finish(backend)
    assert found["g"].result["segments"] == [
        part for row in range(6) for part in ([row, 0, seq, 0], [row, 5, seq + 1, 0])
    ]
    assert (largest_error(found["g"], NEW, start=5) < 1e-4) == recompute_kv
    assert largest_error(found["late"], NEW) < 1e-4, "no new row finds what old weights cached"
    assert "segments" not in found["late"].result


def test_an_offload_frees_the_caches_memory_and_rows_continue_after_it(make: Make) -> None:
    backend = make()
    write(backend, OLD)
    pulled(backend)
    wanted = generate(backend, 0, max_tokens=12).arrays["tokens"].tolist()
    backend.submit(call("g", 0, max_tokens=12), None)
    for _ in range(5):
        backend.step()
    backend.pause()
    kept = bytes(memory_of(backend.arena))
    backend.before_offload()
    assert backend.engine.cache_bytes_held == 0
    assert backend.stats().blocks_held == 0
    memory_of(backend.arena)[:] = bytes(len(kept))
    memory_of(backend.arena)[:] = kept
    backend.after_load(backend.live_parts())
    backend.resume()
    assert finish(backend)["g"].arrays["tokens"].tolist() == wanted
    assert backend.engine.cache_bytes_held > 0


@pytest.fixture
def running(make: Make) -> Any:
    """A backend with old weights, paused in the middle of `g`."""
    backend = make()
    write(backend, OLD)
    pulled(backend)
    backend.submit(call("g", 0, max_tokens=20), None)
    for _ in range(4):
        backend.step()
    backend.pause()
    write(backend, NEW)
    return backend


def refused(backend: Any, match: str) -> None:
    """The update is refused, running rows end unchanged, and new ones are refused."""
    with pytest.raises(StaleWeightsError, match=match):
        pulled(backend)
    found = finish(backend)["g"]
    assert found.arrays["lengths"].tolist() == [4] * 6
    assert found.arrays["finish"].tolist() == [2] * 6
    assert largest_error(found, OLD) < 1e-4
    backend.resume()
    with pytest.raises(StaleWeightsError, match=match):
        backend.submit(call("next", 1), None)


def mended(backend: Any) -> None:
    """The next update is right, and generates."""
    pulled(backend)
    assert largest_error(generate(backend, 0), NEW) < 1e-4


def test_an_update_that_a_packed_copy_would_miss_is_refused(running: Any) -> None:
    head = running.engine.model.lm_head
    # What vLLM does by itself to tied embeddings on CPUs, whose packed copy it keeps for good.
    gemm = importlib.import_module("vllm.model_executor.layers.utils")
    gemm.dispatch_cpu_unquantized_gemm(head, remove_weight=False)
    refused(running, "lm_head computes with a packed copy of its weight")
    head.cpu_linear = torch.nn.functional.linear
    mended(running)


def test_an_update_of_a_tensor_that_nobody_reads_is_refused(running: Any) -> None:
    weight = running.engine.model.model.layers[0].self_attn.qkv_proj.weight
    shared = weight.data
    weight.data = shared.clone()
    refused(running, "qkv_proj.weight is not the tensor that updates")
    weight.data = shared
    mended(running)


def test_a_kernel_that_computes_with_previous_weights_is_refused(running: Any) -> None:
    former = OLD.model.layers[1].mlp.down_proj.weight.detach().clone()

    def compute(module: Any, inputs: Any, outputs: Any) -> Any:
        del module, outputs
        return torch.nn.functional.linear(inputs[0], former), None

    # All tensors are right then; only what is computed is not.
    hook = running.engine.model.model.layers[1].mlp.down_proj.register_forward_hook(compute)
    refused(running, "logprobs differ by up to")
    hook.remove()
    mended(running)


def test_nan_weights_are_refused(running: Any) -> None:
    piece = running.slices()[3]
    view(running.arena, piece).fill_(float("nan"))
    refused(running, "logprobs differ by up to nan")
    write(running, NEW)
    mended(running)


def test_a_checkpoint_of_the_trainer_is_loaded(make: Make, checkpoints: Path) -> None:
    backend = make()
    NEW.save_pretrained(checkpoints / "job" / "step")
    loading = BackendCall(
        operation="load",
        kind=OperationKind.LOAD_CHECKPOINT,
        params=CheckpointParams(name="step"),
        job="job",
        arrays={},
        seq=70,
    )
    write(backend, OLD)
    backend.run(loading)
    assert backend.stats().weights_seq == 70
    assert largest_error(generate(backend, 70), NEW) < 1e-4
