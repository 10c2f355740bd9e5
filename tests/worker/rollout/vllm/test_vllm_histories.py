"""Random histories of vLLM's engine: every token is drawn again by a plain model."""

from dataclasses import dataclass
from typing import Any

import pytest

from tests.worker.rollout.engine.test_histories import History
from tests.worker.rollout.vllm.backends import MARKS, trained, write
from tests.worker.rollout.vllm.conftest import Make

pytestmark = MARKS
MODELS = [trained("qwen2", seed) for seed in (2, 5, 8)]


@dataclass(kw_only=True)
class VllmHistory(History):
    """A history of a backend that lived others before."""

    backend: Any

    def start(self) -> Any:
        self.load()
        self.backend.engine.weights_changed(self.version)
        return self.backend.engine

    def load(self) -> None:
        write(self.backend, self.versions[self.version])

    def inspect(self) -> None:
        rows = sum(made.unfinished for made in self.running.values())
        stats = self.engine.stats()
        assert stats.running + stats.waiting == len(self.engine.lengths()) == rows
        assert stats.blocks_held <= stats.blocks


@pytest.mark.parametrize("seed", range(8))
def test_every_token_is_what_its_weights_draw_whatever_happened(make: Make, seed: int) -> None:
    # A sequence needs two blocks of 32 tokens of 1024 bytes.
    blocks, slots = ((4, 8), (32, 3))[seed % 2]
    backend = make(
        max_sequence_tokens=48, kv_cache_bytes=blocks * 32 * 1024, max_concurrent_samples=slots
    )
    first = backend.engine.weights_seq + 1
    VllmHistory(seed, dict(enumerate(MODELS, first)), backend=backend).run()
