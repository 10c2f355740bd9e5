"""Continues the rows of an interrupted generation, and joins them with what was drawn before. Pure.

Each unfinished row becomes a prompt of its own: the former prompt and the tokens drawn so far. It
has its own place in its random stream, so the tokens are those of an undisturbed run. An engine
looks for stops in all drawn tokens, also in those of the prompt. The keys and values of the drawn
tokens are computed again.
"""

import numpy as np
from msgspec.structs import replace

from plexrl.wire.operations import GenerateParams, SamplingParams
from plexrl.wire.tensors import Array, Arrays

ABORTED = 2
"""Value of `finish` for a row that has not ended by itself."""
DRAWN = ("tokens", "logprobs", "sampling_logprobs", "top_ids", "top_logprobs")
"""Arrays of a result with an entry for each drawn token."""
OF_PROMPTS = ("prompt_logprobs", "prompt_top_ids", "prompt_top_logprobs")
"""Arrays of a result with an entry for each token of the prompts."""


class Continuation:
    """The rest of a generation. `arrays`: its prompts; `partial`: its result so far."""

    def __init__(self, params: GenerateParams, arrays: Arrays, partial: Arrays) -> None:
        sampling = params.sampling
        names = [name for name in DRAWN if name in partial]
        self._drawn = {name: _rows(partial[name], partial["lengths"]) for name in names}
        self._of_prompts = {name: partial[name] for name in OF_PROMPTS if name in partial}
        self._prompt_lengths = arrays["lengths"]
        self._samples = params.samples_per_prompt
        self._finish = partial["finish"].copy()
        self.unfinished = np.flatnonzero(self._finish == ABORTED)
        self.params = replace(params, samples_per_prompt=1)
        self.arrays = self._prompts(params, sampling, arrays)
        """The prompts of the unfinished rows."""

    def _prompts(self, params: GenerateParams, sampling: SamplingParams, arrays: Arrays) -> Arrays:
        each = params.samples_per_prompt
        prompts = _rows(arrays["tokens"], arrays["lengths"])
        rows = self.unfinished
        drawn = self._drawn["tokens"]
        kept = np.array([len(drawn[row]) for row in rows.tolist()], dtype=np.int64)
        number = rows % each if "first_sample" in arrays else rows
        longer = [np.concatenate([prompts[row // each], drawn[row]]) for row in rows.tolist()]
        return {
            "tokens": np.concatenate(longer),
            "lengths": np.array([len(prompt) for prompt in longer], dtype=np.int32),
            "max_tokens": _setting("max_tokens", sampling, arrays, rows // each) - kept,
            "drawn_tokens": _setting("drawn_tokens", sampling, arrays, rows // each) + kept,
            "first_sample": _setting("first_sample", sampling, arrays, rows // each) + number,
        }

    def joined(self, result: Arrays) -> Arrays:
        """All rows, with what the unfinished ones have drawn now."""
        rows = self.unfinished.tolist()
        joined: dict[str, list[Array]] = {}
        for name, before in self._drawn.items():
            joined[name] = list(before)
            for row, more in zip(rows, _rows(result[name], result["lengths"]), strict=True):
                joined[name][row] = np.concatenate([before[row], more])
        finish = self._finish.copy()
        finish[self.unfinished] = result["finish"]
        return {
            **{name: np.concatenate(each) for name, each in joined.items()},
            "lengths": np.array([len(row) for row in joined["tokens"]], dtype=np.int32),
            "finish": finish,
            **{name: self._joined_prompts(name, result) for name in self._of_prompts},
        }

    def _joined_prompts(self, name: str, result: Arrays) -> Array:
        """Values of the prompts' tokens: those of before, or of a prompt that was not computed as a
        whole those of its last unfinished row, whose own prompt begins with it."""
        known = _rows(self._of_prompts["prompt_logprobs"], self._prompt_lengths)
        values = _rows(self._of_prompts[name], self._prompt_lengths)
        again = _rows(result[name], self.arrays["lengths"])
        for row, more in zip(self.unfinished.tolist(), again, strict=True):
            prompt = row // self._samples
            if np.isnan(known[prompt]).any():
                values[prompt] = more[: len(values[prompt])]
        return np.concatenate(values)


def unfinished_rows(result: Arrays) -> int:
    """Rows of a generation's result that have not ended by themselves."""
    return int(np.count_nonzero(result["finish"] == ABORTED))


def _rows(values: Array, lengths: Array) -> list[Array]:
    return np.split(values, np.cumsum(lengths)[:-1])


def _setting(name: str, sampling: SamplingParams, arrays: Arrays, prompts: Array) -> Array:
    """A field of the sampling parameters for the prompts of each row, int64 `[rows]`."""
    if name in arrays:
        return arrays[name].astype(np.int64)[prompts]
    return np.full(len(prompts), getattr(sampling, name), dtype=np.int64)
