"""Backends that the tests of this folder share."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.worker.rollout.vllm.backends import build, deployment

if TYPE_CHECKING:
    from plexrl.worker.rollout.vllm.backend import VllmRolloutBackend

Make = Callable[..., "VllmRolloutBackend"]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where these backends look for checkpoints."""
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="session")
def make(checkpoints: Path) -> Iterator[Make]:
    """Backends by family and options; one is started once, as that takes many seconds."""
    made: dict[str, VllmRolloutBackend] = {}
    set_num_threads = torch.set_num_threads

    def get(family: str = "qwen2", **options: Any) -> "VllmRolloutBackend":
        spec = deployment(family, **options)
        if spec.to_json() not in made:
            made[spec.to_json()] = build(spec, checkpoints)
        backend = made[spec.to_json()]
        backend.resume()
        return backend

    yield get
    if made:
        made.clear()
        from vllm.distributed import cleanup_dist_env_and_memory

        cleanup_dist_env_and_memory()
    # vLLM puts a function there that does nothing.
    torch.set_num_threads = set_num_threads
