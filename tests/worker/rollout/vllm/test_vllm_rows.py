"""Rows of one generation on vLLM: settings of their own, ended and stopped one by one, measured."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from plexrl.wire.messages import RankShare
from tests.worker.rollout.vllm.backends import (
    MARKS,
    PROMPTS,
    call,
    finish,
    generate,
    largest_error,
    pulled,
    rows_of,
    trained,
    write,
)
from tests.worker.rollout.vllm.conftest import Make

pytestmark = MARKS
MODEL, NEW = trained("qwen2", 2), trained("qwen2", 5)


@pytest.fixture
def backend(make: Make) -> Any:
    found = make()
    write(found, MODEL)
    pulled(found)
    return found


def tokens_of(result: Any) -> list[list[int]]:
    return [row.tolist() for row in rows_of(result, "tokens")]


def test_stopped_rows_end_and_the_others_go_on_as_if_alone(backend: Any) -> None:
    whole = tokens_of(generate(backend, 0, max_tokens=12))
    backend.submit(call("g", 0, max_tokens=12), None)
    backend.abort("g", {0, 5})
    for _ in range(4):
        backend.step()
    assert [each[:3] for each in backend.load()["rows"]] == [
        *(("g", 1, 10), ("g", 2, 5), ("g", 3, 5), ("g", 4, 8))
    ]
    assert all(runs for *_, runs in backend.load()["rows"])
    backend.abort("g", {3, 99})
    backend.abort("unknown", {0})
    found = finish(backend)["g"]
    drawn = [0, 12, 12, 4, 12, 0]
    assert tokens_of(found) == [row[:n] for row, n in zip(whole, drawn, strict=True)]
    assert found.arrays["finish"].tolist() == [1 if n == 12 else 2 for n in drawn]
    assert backend.stats().blocks_held == 0
    assert backend.load()["rows"] == []


def test_prompts_with_their_own_settings_draw_what_calls_of_their_own_draw(backend: Any) -> None:
    own = {"max_tokens": [3, 9, 20], "first_sample": [40, 0, 7], "drawn_tokens": [0, 5, 2]}
    together = call("g", 0)
    together.arrays.update({name: np.array(values) for name, values in own.items()})
    backend.submit(together, None)
    found = tokens_of(finish(backend)["g"])
    for at, prompt in enumerate(PROMPTS):
        settings = {name: values[at] for name, values in own.items()}
        backend.submit(call("alone", 0, prompts=[prompt], **settings), None)
        assert found[2 * at : 2 * at + 2] == tokens_of(finish(backend)["alone"])


def test_each_row_is_reported_once_when_it_ends_with_the_versions_that_drew_it(
    backend: Any,
) -> None:
    reported: list[Any] = []
    started = backend.stats().weights_seq
    together = call("g", started)
    together.arrays["max_tokens"] = np.array([8, 3, 6])
    # A replica's part: rows count over the whole call.
    backend.submit(
        replace(together, share=RankShare(first_row=10)), None, lambda *row: reported.append(row)
    )
    for _ in range(4):
        backend.step()
    assert [row for row, *_ in reported] == [12, 13]
    backend.abort("g", {15})
    backend.abort("g", {3})
    assert [row for row, *_ in reported] == [12, 13, 15]
    backend.pause()
    write(backend, NEW)
    pulled(backend)
    backend.resume()
    found = finish(backend)["g"]
    assert [row for row, *_ in reported] == [12, 13, 15, 14, 10, 11]
    for row, tokens, logprobs, code, spans in reported:
        assert tokens == tokens_of(found)[row - 10]
        assert logprobs == rows_of(found, "logprobs")[row - 10].tolist()
        assert code == found.arrays["finish"][row - 10] == (2 if row == 15 else 1)
        old, new = [0, started, 0], [4, started + 1, 0]
        assert spans == ([old] if row in (12, 13, 15) else [old, new])
    write(backend, MODEL)
    pulled(backend)
    assert largest_error(generate(backend, 0), MODEL) < 1e-4


def test_rows_without_a_slot_are_told_apart(make: Make) -> None:
    few = make(max_concurrent_samples=4)
    write(few, MODEL)
    pulled(few)
    few.submit(call("g", 0, max_tokens=12), None)
    few.submit(call("late", 0, n=1, max_tokens=12), None)
    for _ in range(3):
        few.step()
    load = few.load()
    running = [(name, row) for name, row, _, runs in load["rows"] if runs]
    assert running == [("g", row) for row in range(4)]
    waiting = {(name, row): tokens for name, row, tokens, runs in load["rows"] if not runs}
    assert waiting == {("g", 4): 4, ("g", 5): 4, ("late", 0): 6, ("late", 1): 1, ("late", 2): 4}
    assert (few.stats().running, few.stats().waiting) == (4, 5)
    finish(few)


def test_decode_steps_are_measured_with_their_load(backend: Any) -> None:
    before = [each.number for each in backend.load()["steps"]]
    backend.submit(call("g", 0, prompts=PROMPTS[1:], max_tokens=33), None)
    finish(backend)
    first, second = [each for each in backend.load()["steps"] if each.number not in before][-2:]
    assert second.number == first.number + 1
    assert first.running == second.running == 4
    # After the prompts' pass: 16 steps with one token more each.
    assert first.kv_tokens == 2 * (2 + 5) + 4 * 7.5
    assert second.kv_tokens == first.kv_tokens + 4 * 16
    assert first.seconds > 0
