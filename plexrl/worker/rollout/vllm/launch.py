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
from plexrl.worker.rollout.vllm.sampling import RowDraw
from plexrl.worker.rollout.vllm.scheduler import CountingScheduler

if TYPE_CHECKING:
    from torch import nn

BLOCK_TOKENS = 32
"""vLLM's kernels on CPUs want multiples of it."""
STEP_TOKENS_MAX = 2048
KV_BYTES = 1 << 30
"""Budget of the cache where none is given."""


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
    model: "nn.Module",
    *,
    dtype: torch.dtype,
    slots: int,
    sequence_tokens_max: int,
    kv_token_bytes: int,
    kv_bytes_max: int | None,
) -> StartedEngine:
    """An engine for models like `model`, whose weights are yet to be loaded.

    `kv_token_bytes`: what the cache takes for a token; `kv_bytes_max`: its budget, by default what
    all slots need or `KV_BYTES`, and never less than one sequence.

    Raises:
        InvalidRequestError: vLLM cannot run the model here, or the budget of its cache does not
            hold one sequence.
    """
    config: Any = model.config
    block_bytes = kv_token_bytes * BLOCK_TOKENS
    blocks = _block_count(kv_bytes_max, block_bytes, slots, sequence_tokens_max)
    config.architectures = [type(model).__name__]
    config.dtype = dtype
    with tempfile.TemporaryDirectory(prefix="plexrl-vllm-") as directory:
        config.save_pretrained(directory)
        with its_reasons(), _weights_stay_as_they_are():
            return _start(
                directory,
                dtype=str(dtype).removeprefix("torch."),
                max_model_len=sequence_tokens_max,
                max_num_seqs=slots,
                max_num_batched_tokens=max(STEP_TOKENS_MAX, slots),
                # vLLM sets one block aside that stands for none.
                kv_cache_memory_bytes=(blocks + 1) * block_bytes,
            )


@contextmanager
def its_reasons() -> Iterator[None]:
    """What vLLM raises over a model becomes an `InvalidRequestError`."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
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
        # A captured graph would go on reading the tensors that the arena replaces.
        enforce_eager=True,
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


def _block_count(budget: int | None, block_bytes: int, slots: int, sequence_tokens_max: int) -> int:
    """Blocks that the budget pays for, no more than all slots need."""
    sequence_blocks = -(-sequence_tokens_max // BLOCK_TOKENS)
    if budget is not None and budget < sequence_blocks * block_bytes:
        raise InvalidRequestError(
            f"a KV cache of {budget} bytes holds {budget // block_bytes} blocks of {BLOCK_TOKENS} "
            f"tokens; one sequence of the deployment's length takes {sequence_blocks} "
            f"({sequence_blocks * block_bytes} bytes): raise kv_cache_bytes or lower "
            "max_sequence_tokens"
        )
    if budget is None:
        budget = max(KV_BYTES, sequence_blocks * block_bytes)
    return min(budget // block_bytes, slots * sequence_blocks)
