"""Random histories of an engine; every token of every row is then drawn again by a plain model.

The oracle knows no cache, batch or engine: it runs a whole row through the weights that the row's
segment names, and draws at each position with the row's own random stream.
"""

import copy
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from plexrl.model.spec import tiny_qwen2
from plexrl.wire.operations import SamplingParams
from plexrl.worker.models import build_model
from plexrl.worker.rollout.engine import Engine, Generation
from plexrl.worker.rollout.generation import ABORT, LENGTH, STOP, stream_of
from plexrl.worker.rollout.sampling import RowSampling, draw

VOCABULARY = "0123456789abcdefghi"
VERSIONS = {
    version: build_model(tiny_qwen2(VOCABULARY, seed=seed))
    for version, seed in enumerate((2, 5, 8))
}
EOS = 2


def number_of(made: Generation, row: int) -> int:
    """The number of a row's sample."""
    prompt, sample = divmod(row, made.samples_per_prompt)
    firsts = made.prompt_sampling.get("first_sample")
    return row if firsts is None else int(firsts[prompt]) + sample


def check(made: Generation, versions: Mapping[int, Any]) -> None:
    """Every drawn token is the one that its weights draw there, with their logprob."""
    sampling = made.sampling
    for row, (tokens, logprobs) in enumerate(zip(made.tokens, made.logprobs, strict=True)):
        assert len(tokens) == len(logprobs)
        assert (made.finish[row] == LENGTH) <= (len(tokens) == made.max_tokens(row))
        assert (made.finish[row] == STOP) <= (EOS in tokens[-1:])
        if not len(tokens):
            assert made.finish[row] == ABORT
            continue
        assert made.segments[row][0].start == 0
        prompt = made.prompts[row // made.samples_per_prompt]
        version = np.zeros(len(tokens), dtype=np.int64)
        for segment in made.segments[row]:
            version[segment.start :] = segment.weights_seq
        whole = torch.tensor([[*prompt, *tokens.tolist()]])
        with torch.no_grad():
            by_version = {
                number: versions[number](input_ids=whole).logits[0].log_softmax(-1)
                for number in set(version.tolist())
            }
        wanted = torch.stack(
            [by_version[v][len(prompt) - 1 + at] for at, v in enumerate(version.tolist())]
        )
        count = len(tokens)
        rows = RowSampling(
            temperature=torch.full((count,), sampling.temperature),
            top_p=torch.full((count,), sampling.top_p),
            top_k=torch.full((count,), sampling.top_k),
            stream=torch.full((count,), stream_of(sampling.seed or 0, number_of(made, row))),
        )
        assert tokens.tolist() == draw(wanted, rows, torch.arange(count)).tolist()
        own = wanted.gather(-1, torch.from_numpy(tokens.astype(np.int64))[:, None])[:, 0]
        assert np.allclose(logprobs, own.numpy(), atol=1e-4)


@dataclass
class History:
    """One engine and a chance of what happens to it."""

    seed: int
    versions: Mapping[int, Any]
    """Models by version, the first version first."""
    chance: random.Random = field(init=False)
    submitted: int = 0
    ended: list[Generation] = field(default_factory=list)
    running: dict[str, Generation] = field(default_factory=dict)
    rows_ended: list[tuple[str, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.version = min(self.versions)
        self.engine = self.start()

    def start(self) -> Any:
        """The engine, with the first version."""
        self.model = copy.deepcopy(self.versions[self.version])
        return Engine(
            self.model,
            slots=self.chance.choice([3, 8, 20]),
            sequence_tokens_max=48,
            kv_bytes_max=self.chance.choice([12, 20, 80]) * 4 * 512,
            block_tokens=4,
            step_tokens_max=self.chance.choice([4, 16, 500]),
        )

    def load(self) -> None:
        """Replace the weights in place, as a pull does."""
        new = self.versions[self.version].parameters()
        with torch.no_grad():
            for home, source in zip(self.model.parameters(), new, strict=True):
                home.copy_(source)

    def inspect(self) -> None:
        """Check the engine between two calls."""
        self.engine.check_invariants()

    def submit(self) -> None:
        shared = [self.chance.randrange(3, 20) for _ in range(self.chance.randrange(0, 20))]
        prompts = [
            [*shared, *(self.chance.randrange(3, 20) for _ in range(self.chance.randint(1, 9)))]
            for _ in range(self.chance.randint(1, 3))
        ]
        prompts += self.chance.choices(prompts, k=self.chance.choice([0, 0, 3]))
        per_prompt = {
            "max_tokens": [self.chance.randint(1, 19) for _ in prompts],
            "first_sample": [10 * self.chance.randrange(20) for _ in prompts],
        }
        made = Generation(
            name=f"g{self.submitted}",
            prompts=prompts,
            prompt_sampling={
                name: np.array(values, dtype=np.int64)
                for name, values in per_prompt.items()
                if self.chance.random() < 0.5
            },
            on_end=lambda row: self.rows_ended.append((made.name, row)),
            samples_per_prompt=self.chance.choice([1, 1, 4]),
            sampling=SamplingParams(
                max_tokens=self.chance.randint(1, 19),
                temperature=self.chance.choice([0.0, 1.0, 1.5]),
                top_k=self.chance.choice([0, 5]),
                seed=self.submitted,
                ignore_eos=self.chance.random() < 0.5,
            ),
            emit=None,
            weights_seq=self.version,
        )
        self.submitted += 1
        self.running[made.name] = made
        self.engine.submit(made)

    def end(self, made: Generation) -> None:
        assert made.unfinished == 0
        assert self.running.pop(made.name) is made
        self.ended.append(made)

    def happen(self) -> None:
        names = sorted(self.running)
        match self.chance.randrange(12):
            case 0 | 1 if self.submitted < 8:
                self.submit()
            case 2 if names:
                made = self.running[self.chance.choice(names)]
                rows = range(len(made.finish) + 1)
                some = self.chance.sample(rows, self.chance.randrange(len(rows)))
                self.engine.abort(made.name, self.chance.choice([None, frozenset(some)]))
            case 3 if names:
                partial = self.engine.interrupt(self.chance.choice(names))
                if partial is not None:
                    self.end(partial)
            case 4:
                self.engine.pause()
            case 5:
                self.engine.drop_cache()
            case 6 if self.version < max(self.versions):
                self.version += 1
                self.load()
                self.engine.weights_changed(self.version)
            case _:
                self.engine.resume()
                for made in self.engine.step():
                    self.end(made)
        self.inspect()

    def run(self) -> None:
        """Live it to its end, and check all that was drawn."""
        for _ in range(3):
            self.submit()
        for _ in range(60):
            self.happen()
        self.engine.resume()
        while self.engine.has_work:
            for made in self.engine.step():
                self.end(made)
            self.inspect()
        assert not self.running
        assert len(self.ended) == self.submitted
        rows = [(made.name, row) for made in self.ended for row in range(len(made.finish))]
        assert sorted(self.rows_ended) == sorted(rows)
        for made in self.ended:
            check(made, self.versions)
        assert self.engine.stats().blocks_held == 0


@pytest.mark.parametrize("seed", range(12))
def test_every_token_is_what_its_weights_draw_whatever_happened(seed: int) -> None:
    History(seed, VERSIONS).run()
