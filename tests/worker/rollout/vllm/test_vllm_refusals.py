"""What vLLM cannot run is refused with its reason. In processes of their own: an engine that failed
takes vLLM's process groups along when it is collected, and with them any other engine."""

import multiprocessing
import re
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from plexrl.errors import InvalidRequestError
from plexrl.model.deployment_spec import deployment_spec_from_json
from plexrl.model.spec import tiny_qwen2
from tests.worker.rollout.vllm.backends import MARKS, VOCABULARY, build, deployment

pytestmark = MARKS


def refusal_of(spec_json: str, folder: str) -> str:
    """Why the backend cannot be built."""
    try:
        build(deployment_spec_from_json(spec_json), Path(folder))
    except InvalidRequestError as error:
        return error.message
    return "it was built"


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered"),
        RuntimeError("NCCL error: remote process exited or there was a network error"),
    ],
    ids=lambda error: str(error).partition(":")[0],
)
def test_what_a_device_or_another_rank_lacks_is_no_fault_of_the_model(error: Exception) -> None:
    from plexrl.worker.rollout.vllm.launch import vllm_errors_explained

    with pytest.raises(type(error)) as raised, vllm_errors_explained():
        raise error
    assert raised.value is error


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        # Too small for its kernels on CPUs, which say so at their first use only.
        ({"model": tiny_qwen2(VOCABULARY)}, r"vLLM cannot run this model: .*head_dim=16"),
        (
            {"max_sequence_tokens": 513},
            r"vLLM cannot run this model: .*\(513\).*max_position_embeddings=512",
        ),
        ({"kv_cache_bytes": 32 * 1024}, r"holds 1 blocks of 32 tokens.* needs 2 "),
    ],
)
def test_what_vllm_cannot_run_is_refused_with_its_reason(
    options: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        found = pool.submit(refusal_of, deployment(**options).to_json(), str(tmp_path)).result()
    assert re.search(reason, found, re.DOTALL), found
