"""Starts vLLM's engine in this process, with an empty model."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import vllm.envs
import vllm.model_executor.layers.utils as gemm
from vllm import EngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from plexrl.errors import InvalidRequestError
from plexrl.model.memory.kv_cache import BLOCK_TOKENS
from plexrl.worker.rollout.engine.tensor_parallel import is_lost_rank_error
from plexrl.worker.rollout.rollout_engine import STEP_TOKENS_MAX, block_count
from plexrl.worker.rollout.vllm.sampling import RowDraw
from plexrl.worker.rollout.vllm.scheduler import CountingScheduler

if TYPE_CHECKING:
    from torch import nn

TOKENS = BLOCK_TOKENS["vllm"]

EXTERNAL = "external_launcher"
"""vLLM's name for ranks that it has not started itself."""

_OF_RANKS: dict[str, Any] = {
    "distributed_executor_backend": EXTERNAL,
    # It needs to see the GPUs of all ranks.
    "disable_custom_all_reduce": True,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedEngine:
    """vLLM's engine, and the internal parts that the adapter uses."""

    llm: Any
    """`LLMEngine`."""
    scheduler: CountingScheduler
    model: "nn.Module"
    runner: Any
    """vLLM's model runner, which holds the KV cache."""


class RankExecutor(UniProcExecutor):  # type: ignore[misc]  # vLLM is not installed for type checks
    """The model of one tensor-parallel rank, in this process.

    Each rank has a whole engine. All engines plan the same steps, because they get the same calls
    and draw from the same gathered logits.
    """

    def _distributed_args(self) -> tuple[str, int, int]:
        """vLLM uses the process group that exists, and `cuda:0`. From the first value it only makes
        a name for shared memory, which ranks with different names do without: a killed rank would
        leave it behind."""
        rank = dist.get_rank()
        return f"rank:{rank}", rank, 0


def start_engine(
    model: "nn.Module",
    *,
    dtype: torch.dtype,
    slots: int,
    sequence_tokens_max: int,
    kv_token_bytes: int,
    kv_bytes_max: int | None,
    on_gpu: bool = False,
    tp: int = 1,
) -> StartedEngine:
    """An engine for models like `model`; the caller loads the weights later.

    `tp`: ranks of each tensor-parallel group. If there are several, the default process group
    exists, and all of its ranks call this.

    `kv_token_bytes`: cache bytes per token. `kv_bytes_max`: budget of the cache, of which
    no more than the need of all slots is used; by default `KV_BYTES`, or one sequence. `on_gpu`:
    the engine is on the GPU that this process sees.

    Raises:
        InvalidRequestError: vLLM cannot run the model here, or the budget does not hold one
            sequence.
    """
    config: Any = model.config
    block_bytes = kv_token_bytes * TOKENS
    blocks = min(
        block_count(kv_bytes_max, block_bytes, TOKENS, sequence_tokens_max, slots),
        slots * -(-sequence_tokens_max // TOKENS),
    )
    config.architectures = [type(model).__name__]
    config.dtype = dtype
    with tempfile.TemporaryDirectory(prefix="plexrl-vllm-") as directory:
        config.save_pretrained(directory)
        with vllm_errors_explained(), _weights_not_packed():
            return _start(
                directory,
                dtype=str(dtype).removeprefix("torch."),
                max_model_len=sequence_tokens_max,
                max_num_seqs=slots,
                max_num_batched_tokens=max(STEP_TOKENS_MAX, slots),
                # vLLM reserves one block as the null block.
                kv_cache_memory_bytes=(blocks + 1) * block_bytes,
                # So much of a GPU must be free at the start; it does not size the cache. The
                # StateManager has measured what is free.
                **({"gpu_memory_utilization": 1e-6} if on_gpu else {}),
                **(_OF_RANKS if tp > 1 else {}),
                tensor_parallel_size=tp,
            )


@contextmanager
def vllm_errors_explained() -> Iterator[None]:
    """Turn vLLM's errors about a model into `InvalidRequestError`."""
    try:
        yield
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        # It is the device or its other users, not the model: the worker is restarted.
        raise
    except (ValueError, RuntimeError) as error:
        if is_lost_rank_error(error):
            raise
        raise InvalidRequestError(
            f"vLLM cannot run this model: {error}: use backend 'torch'"
        ) from error


def _start(directory: str, **options: Any) -> StartedEngine:
    # vLLM reads settings from the environment; as attributes they hold in this process only. The
    # first disables its usage reports, the second its newer runner, which has no custom processors.
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
        block_size=TOKENS,
        # A captured graph would continue to read the tensors that the arena replaces.
        enforce_eager=True,
        disable_log_stats=True,
        **options,
    )
    config = arguments.create_engine_config(UsageContext.ENGINE_CONTEXT)
    alone = arguments.tensor_parallel_size == 1
    # On CPUs vLLM would start separate processes, whose weights are not accessible.
    config.parallel_config.distributed_executor_backend = "uni" if alone else EXTERNAL
    executor = UniProcExecutor if alone else RankExecutor
    llm = LLMEngine(config, executor, log_stats=False, multiprocess_mode=False)
    core = llm.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    return StartedEngine(llm=llm, scheduler=core.scheduler, model=runner.model, runner=runner)


@contextmanager
def _weights_not_packed() -> Iterator[None]:
    """Prevent vLLM from packing linear weights on CPUs.

    vLLM computes with the packed copy. For tied embeddings it kept that copy after every later
    load, without an error.
    """
    pack = gemm.dispatch_cpu_unquantized_gemm
    gemm.dispatch_cpu_unquantized_gemm = _use_plain_linear
    try:
        yield
    finally:
        gemm.dispatch_cpu_unquantized_gemm = pack


def _use_plain_linear(layer: Any, remove_weight: bool) -> None:
    del remove_weight
    layer.cpu_linear = torch.nn.functional.linear
