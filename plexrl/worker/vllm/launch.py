"""vLLM's engine, started in this process with an empty model."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import vllm.envs
import vllm.model_executor.layers.utils as gemm
from vllm import EngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from plexrl.errors import InvalidRequestError
from plexrl.worker.vllm.sampling import RowDraw
from plexrl.worker.vllm.scheduler import CountingScheduler

if TYPE_CHECKING:
    from torch import nn

BLOCK_TOKENS = 32
"""vLLM's kernels on CPUs want multiples of it."""
STEP_TOKENS_MAX = 2048
KV_BYTES = 1 << 30
"""Budget of the cache, unless the slots need less or one sequence more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedEngine:
    """vLLM's engine, and the parts of it that the adapter works on."""

    llm: Any
    """`LLMEngine`."""
    scheduler: CountingScheduler
    model: "nn.Module"
    runner: Any
    """vLLM's model runner, which holds the KV cache."""


def start_engine(
    model: "nn.Module", *, dtype: torch.dtype, slots: int, sequence_tokens_max: int
) -> StartedEngine:
    """An engine for models like `model`, whose weights are yet to be loaded.

    Raises:
        InvalidRequestError: vLLM cannot run the model here; it says why.
    """
    config: Any = model.config
    config.architectures = [type(model).__name__]
    config.dtype = dtype
    with tempfile.TemporaryDirectory(prefix="plexrl-vllm-") as directory:
        config.save_pretrained(directory)
        try:
            with _weights_stay_as_they_are():
                return _start(
                    directory,
                    dtype=str(dtype).removeprefix("torch."),
                    max_model_len=sequence_tokens_max,
                    max_num_seqs=slots,
                    max_num_batched_tokens=max(STEP_TOKENS_MAX, slots),
                    kv_cache_memory_bytes=_cache_bytes(config, dtype, slots, sequence_tokens_max),
                )
        except (ValueError, NotImplementedError) as error:
            raise InvalidRequestError(
                f"vLLM cannot run this model: {error}: use backend 'torch'"
            ) from error


def _start(directory: str, **options: Any) -> StartedEngine:
    # vLLM takes settings from the environment; as attributes they hold in this process only.
    # It would report to its makers, and its newer runner has no processors of our own.
    vllm.envs.VLLM_NO_USAGE_STATS = True
    vllm.envs.VLLM_USE_V2_MODEL_RUNNER = False
    arguments = EngineArgs(
        model=directory,
        skip_tokenizer_init=True,
        load_format="dummy",
        generation_config="vllm",
        logprobs_mode="raw_logprobs",
        logits_processors=[RowDraw],
        scheduler_cls=CountingScheduler,
        async_scheduling=False,
        block_size=BLOCK_TOKENS,
        enforce_eager=not torch.cuda.is_available(),
        disable_log_stats=True,
        **options,
    )
    config = arguments.create_engine_config(UsageContext.ENGINE_CONTEXT)
    # On CPUs vLLM wants a process of its own, whose weights would be out of reach.
    config.parallel_config.distributed_executor_backend = "uni"
    llm = LLMEngine(config, UniProcExecutor, log_stats=False, multiprocess_mode=False)
    core = llm.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    return StartedEngine(llm=llm, scheduler=core.scheduler, model=runner.model, runner=runner)


@contextmanager
def _weights_stay_as_they_are() -> Iterator[None]:
    """On CPUs vLLM packs linear weights and computes with the packed copy. Of tied embeddings it
    was seen to keep that copy after every later load, without an error; so none is made."""
    pack = gemm.dispatch_cpu_unquantized_gemm
    gemm.dispatch_cpu_unquantized_gemm = _compute_plainly
    try:
        yield
    finally:
        gemm.dispatch_cpu_unquantized_gemm = pack


def _compute_plainly(layer: Any, remove_weight: bool) -> None:
    del remove_weight
    layer.cpu_linear = torch.nn.functional.linear


def _cache_bytes(config: Any, dtype: torch.dtype, slots: int, sequence_tokens_max: int) -> int:
    """What all slots need; of a large model the budget, but never less than one sequence needs."""
    heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    tokens_bytes = 2 * config.num_hidden_layers * kv_heads * head_size * dtype.itemsize
    block_bytes = tokens_bytes * BLOCK_TOKENS
    sequence_blocks = -(-sequence_tokens_max // BLOCK_TOKENS)
    affordable = max(KV_BYTES // block_bytes, sequence_blocks)
    # vLLM sets one block aside that stands for none; another is for probing beside full slots.
    return int((min(affordable, slots * sequence_blocks) + 2) * block_bytes)
