"""An interrupted generation, continued any number of times, has the rows of an undisturbed one."""

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from plexrl.router.dispatch.continuation import ABORTED, Continuation, unfinished_rows
from plexrl.wire.operations import GenerateParams, SamplingParams
from plexrl.wire.tensors import Arrays

STOP, LENGTH = 0, 1
END = 7


def draw(params: GenerateParams, arrays: Arrays, steps: list[int] | None) -> Arrays:
    """What an engine draws in so many steps for each row (None: to the end). A token depends on the
    number of the sample, its position in the random stream and all tokens before it."""
    sampling, each = params.sampling, params.samples_per_prompt
    prompts = np.split(arrays["tokens"], np.cumsum(arrays["lengths"])[:-1])
    found: dict[str, list[Any]] = {"tokens": [], "logprobs": [], "finish": [], "lengths": []}
    for row in range(len(prompts) * each):
        prompt = row // each

        def setting(name: str, prompt: int = prompt) -> int:
            own = arrays.get(name)
            return int(getattr(sampling, name) if own is None else own[prompt])

        number = setting("first_sample") + (row % each if "first_sample" in arrays else row)
        drawn: list[int] = []
        earlier = prompts[prompt].tolist()[-setting("drawn_tokens") or len(prompts[prompt]) :]
        finish = ABORTED
        while finish == ABORTED and (steps is None or len(drawn) < steps[row]):
            known = [*prompts[prompt].tolist(), *drawn]
            place = setting("drawn_tokens") + len(drawn)
            drawn.append(int(hash((number, place, tuple(known))) % 8))
            if drawn[-1] == END or any(
                tuple([*earlier, *drawn][-len(stop) :]) == stop for stop in sampling.stop_sequences
            ):
                finish = STOP
            elif len(drawn) == setting("max_tokens"):
                finish = LENGTH
        found["tokens"] += drawn
        found["logprobs"] += [-float(token) for token in drawn]
        found["finish"].append(finish)
        found["lengths"].append(len(drawn))
    tokens = np.array(found["tokens"], dtype=np.int32)
    # A row that has drawn nothing may not have computed its prompt.
    computed = np.add.reduceat(found["lengths"], np.arange(0, len(found["lengths"]), each)) > 0
    scored = np.where(np.repeat(computed, arrays["lengths"]), arrays["tokens"], np.nan)
    return {
        "tokens": tokens,
        "sampling_logprobs": (tokens / 2).astype(np.float32),
        "top_ids": np.stack([tokens, tokens + 1], axis=1),
        "top_logprobs": np.stack([tokens, -tokens], axis=1).astype(np.float32),
        "prompt_logprobs": scored.astype(np.float32),
        "prompt_top_ids": np.stack([scored, scored], axis=1).astype(np.float32),
        "logprobs": np.array(found["logprobs"], dtype=np.float32),
        "finish": np.array(found["finish"], dtype=np.uint8),
        "lengths": np.array(found["lengths"], dtype=np.int32),
    }


@given(data=st.data())
def test_any_interruptions_change_no_row(data: st.DataObject) -> None:
    prompts = data.draw(st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=3), min_size=1))
    each = data.draw(st.integers(1, 3))
    stops = data.draw(
        st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=3).map(tuple), max_size=2)
    )
    sampling = SamplingParams(
        max_tokens=12,
        stop_sequences=tuple(stops),
        first_sample=data.draw(st.integers(0, 3)),
        drawn_tokens=data.draw(st.integers(0, 3)),
    )
    params = GenerateParams(samples_per_prompt=each, sampling=sampling)
    arrays: Arrays = {
        "tokens": np.array([token for prompt in prompts for token in prompt], dtype=np.int32),
        "lengths": np.array([len(prompt) for prompt in prompts], dtype=np.int32),
    }
    for name in ("max_tokens", "first_sample", "drawn_tokens"):
        if data.draw(st.booleans()):
            values = data.draw(
                st.lists(st.integers(1, 9), min_size=len(prompts), max_size=len(prompts))
            )
            arrays[name] = np.array(values, dtype=np.int64)
    wanted = draw(params, arrays, None)
    rows = len(prompts) * each
    cuts = st.lists(st.integers(0, 6), min_size=rows, max_size=rows)
    found = draw(params, arrays, data.draw(cuts))
    while unfinished_rows(found):
        left = Continuation(params, arrays, found)
        assert left.params.samples_per_prompt == 1
        assert (left.arrays["max_tokens"] > 0).all()
        steps = data.draw(st.one_of(st.none(), cuts))
        found = left.joined(draw(left.params, left.arrays, steps))
    for name, expected in wanted.items():
        assert np.array_equal(found[name], expected), name
        assert found[name].dtype == expected.dtype
