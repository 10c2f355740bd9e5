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


class Continuation:
    """The rest of a generation. `arrays`: its prompts; `partial`: its result so far."""

    def __init__(self, params: GenerateParams, arrays: Arrays, partial: Arrays) -> None:
        sampling = params.sampling
        drawn = _rows(partial["tokens"], partial["lengths"])
        logprobs = _rows(partial["logprobs"], partial["lengths"])
        self._finish = partial["finish"].copy()
        self.unfinished = np.flatnonzero(self._finish == ABORTED)
        self._drawn, self._logprobs = drawn, logprobs
        self.params = replace(params, samples_per_prompt=1)
        self.arrays = self._prompts(params, sampling, arrays)
        """The prompts of the unfinished rows."""

    def _prompts(self, params: GenerateParams, sampling: SamplingParams, arrays: Arrays) -> Arrays:
        each = params.samples_per_prompt
        prompts = _rows(arrays["tokens"], arrays["lengths"])
        rows = self.unfinished
        kept = np.array([len(self._drawn[row]) for row in rows.tolist()], dtype=np.int64)
        number = rows % each if "first_sample" in arrays else rows
        longer = [np.concatenate([prompts[row // each], self._drawn[row]]) for row in rows.tolist()]
        return {
            "tokens": np.concatenate(longer),
            "lengths": np.array([len(prompt) for prompt in longer], dtype=np.int32),
            "max_tokens": _setting("max_tokens", sampling, arrays, rows // each) - kept,
            "drawn_tokens": _setting("drawn_tokens", sampling, arrays, rows // each) + kept,
            "first_sample": _setting("first_sample", sampling, arrays, rows // each) + number,
        }

    def joined(self, result: Arrays) -> Arrays:
        """All rows, with what the unfinished ones have drawn now."""
        drawn, logprobs, finish = list(self._drawn), list(self._logprobs), self._finish.copy()
        more = _rows(result["tokens"], result["lengths"])
        more_logprobs = _rows(result["logprobs"], result["lengths"])
        for index, row in enumerate(self.unfinished.tolist()):
            drawn[row] = np.concatenate([drawn[row], more[index]])
            logprobs[row] = np.concatenate([logprobs[row], more_logprobs[index]])
            finish[row] = result["finish"][index]
        return {
            "tokens": np.concatenate(drawn),
            "lengths": np.array([len(row) for row in drawn], dtype=np.int32),
            "logprobs": np.concatenate(logprobs),
            "finish": finish,
        }


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
