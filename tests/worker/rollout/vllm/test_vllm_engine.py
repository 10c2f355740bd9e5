"""What vLLM draws under our engine, and what becomes of rows that do not end by themselves."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from plexrl.errors import BatchShapeError
from plexrl.model.spec import tiny_qwen2
from plexrl.worker.rollout.engine import TorchRolloutBackend
from plexrl.worker.rollout.stops import TextDecoder
from tests.worker.rollout.vllm.backends import (
    MARKS,
    PROMPTS,
    SEQUENCE_MAX,
    VOCABULARY,
    call,
    deployment,
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
MODEL = trained("qwen2", 2)


@pytest.fixture
def backend(make: Make) -> Any:
    found = make()
    write(found, MODEL)
    pulled(found)
    return found


def test_greedy_tokens_are_those_of_transformers(backend: Any) -> None:
    found = generate(backend, 0, n=1, temperature=0.0, max_tokens=10)
    for prompt, tokens in zip(PROMPTS, rows_of(found, "tokens"), strict=True):
        wanted = MODEL.generate(
            torch.tensor([prompt]), max_new_tokens=10, do_sample=False, eos_token_id=None
        )
        assert tokens.tolist() == wanted[0, len(prompt) :].tolist()
    assert found.arrays["finish"].tolist() == [1, 1, 1]


def test_a_seed_draws_the_same_as_on_the_torch_engine(backend: Any, tmp_path: Path) -> None:
    torch_backend = TorchRolloutBackend(deployment(backend="torch"), tmp_path)
    torch_backend.lay_out()
    torch_backend.materialise()
    for sampling in (
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.8},
        {"temperature": 1.3, "top_k": 5},
        {"temperature": 2.0, "ignore_eos": False, "max_tokens": 30},
    ):
        found = generate(backend, 0, n=4, **sampling)
        wanted = generate(torch_backend, 0, n=4, **sampling)
        for array in ("tokens", "lengths", "finish"):
            assert found.arrays[array].tolist() == wanted.arrays[array].tolist(), sampling
        assert largest_error(found, MODEL) < 1e-4, "raw logprobs, whatever the temperature"


def test_a_row_ends_with_its_stop_token_or_sequence(backend: Any) -> None:
    free = rows_of(generate(backend, 0, n=1, max_tokens=12), "tokens")[0].tolist()
    stopped = generate(backend, 0, n=1, max_tokens=12, stop_token_ids=(free[4],))
    assert rows_of(stopped, "tokens")[0].tolist() == free[: free.index(free[4]) + 1]
    assert stopped.arrays["finish"][0] == 0
    pair = generate(backend, 0, n=1, max_tokens=12, stop_sequences=((free[5], free[6]),))
    assert rows_of(pair, "tokens")[0].tolist() == free[:7]
    assert pair.arrays["finish"][0] == 0
    decoder = TextDecoder(tiny_qwen2(VOCABULARY))
    decoder.prepare()
    text = decoder(free)
    ended = generate(backend, 0, n=1, max_tokens=12, stop_strings=(text[3:6],))
    drawn = rows_of(ended, "tokens")[0].tolist()
    assert drawn == free[: len(drawn)]
    assert text[3:6] in decoder(drawn)
    assert text[3:6] not in decoder(drawn[:-1])
    assert not backend.has_work
    assert backend.stats().blocks_held == 0


def test_rows_end_at_the_deployments_bound(backend: Any) -> None:
    found = generate(backend, 0, n=1, max_tokens=1000)
    lengths = [SEQUENCE_MAX - len(prompt) for prompt in PROMPTS]
    assert found.arrays["lengths"].tolist() == lengths
    too_long = call("long", 0)
    too_long.arrays["tokens"] = np.full(SEQUENCE_MAX, 3)
    too_long.arrays["lengths"] = np.array([SEQUENCE_MAX])
    with pytest.raises(BatchShapeError, match="prompt 0 has 40 tokens; it must have 1 to 39"):
        backend.submit(too_long, None)
    assert not backend.has_work


def test_a_stream_brings_the_result_token_by_token(backend: Any) -> None:
    chunks: list[tuple[int, list[int], list[float]]] = []
    backend.submit(call("s", 0), lambda *chunk: chunks.append(chunk))
    found = finish(backend)["s"]
    assert all(len(tokens) == len(logprobs) == 1 for _, tokens, logprobs in chunks)
    for row, tokens in enumerate(rows_of(found, "tokens")):
        streamed = [part[1][0] for part in chunks if part[0] == row]
        assert streamed == tokens.tolist()


def test_an_abort_returns_what_there_is(backend: Any) -> None:
    whole = rows_of(generate(backend, 0, max_tokens=20), "tokens")
    backend.submit(call("g", 0, max_tokens=20), None)
    backend.submit(call("other", 0, seed=3), None)
    for _ in range(4):
        backend.step()
    backend.abort("g")
    backend.abort("unknown")
    found = finish(backend)
    assert set(found) == {"g", "other"}
    assert found["g"].arrays["finish"].tolist() == [2] * 6
    for part, tokens in zip(rows_of(found["g"], "tokens"), whole, strict=True):
        assert part.tolist() == tokens.tolist()[: len(part)]
    assert found["g"].arrays["lengths"].tolist() == [4] * 6
    assert found["other"].arrays["finish"].tolist() == [1] * 6
    assert backend.stats().blocks_held == 0


def test_an_interrupt_takes_out_what_there_is_and_no_step_returns_it(backend: Any) -> None:
    backend.submit(call("g", 0, max_tokens=20), None)
    for _ in range(3):
        backend.step()
    backend.pause()
    found = backend.interrupt("g")
    assert found is not None
    assert found.arrays["lengths"].tolist() == [3] * 6
    assert backend.interrupt("g") is None
    backend.resume()
    assert finish(backend) == {}


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.95}])
def test_a_row_that_moves_to_another_engine_draws_as_if_it_had_stayed(
    make: Make, sampling: dict[str, Any]
) -> None:
    stays, first, second = make(), make(), make(max_concurrent_samples=4)
    for each in (stays, second):
        write(each, MODEL)
        pulled(each)
    whole = generate(stays, 0, n=1, max_tokens=20, **sampling)
    first.submit(call("g", 0, n=1, max_tokens=20, **sampling), None)
    for _ in range(7):
        first.step()
    part = first.interrupt("g")
    assert part is not None
    # Its neighbours on the other engine change nothing.
    second.submit(call("other", 0, seed=9, max_tokens=20), None)
    for row, (prompt, tokens) in enumerate(zip(PROMPTS, rows_of(part, "tokens"), strict=True)):
        assert len(tokens) == 7
        so_far = [*prompt, *tokens.tolist()]
        moved = {"max_tokens": 13, "first_sample": row, "drawn_tokens": 7, **sampling}
        second.submit(call(f"row {row}", 0, n=1, prompts=[so_far], **moved), None)
    found = finish(second)
    for row, (tokens, logprobs) in enumerate(
        zip(rows_of(whole, "tokens"), rows_of(whole, "logprobs"), strict=True)
    ):
        rest = found[f"row {row}"].arrays
        assert [*rows_of(part, "tokens")[row], *rest["tokens"]] == tokens.tolist()
        joint = np.concatenate([rows_of(part, "logprobs")[row], rest["logprobs"]])
        np.testing.assert_allclose(joint, logprobs, atol=1e-5)


def test_a_paused_engine_draws_nothing_and_continues_after_resume(backend: Any) -> None:
    wanted = generate(backend, 0, max_tokens=12).arrays["tokens"].tolist()
    backend.submit(call("g", 0, max_tokens=12), None)
    for _ in range(5):
        backend.step()
    backend.pause()
    drawn = backend.stats().tokens_drawn
    assert not backend.has_work
    assert backend.step() == []
    backend.submit(call("late", 0, max_tokens=12), None)
    assert backend.stats().tokens_drawn == drawn
    assert backend.stats().paused
    backend.resume()
    found = finish(backend)
    assert found["g"].arrays["tokens"].tolist() == wanted
    assert found["late"].arrays["tokens"].tolist() == wanted


def test_many_requests_over_few_slots_and_blocks_draw_as_alone(make: Make) -> None:
    # A token takes 1024 bytes, a block 32 tokens.
    short = make(kv_cache_bytes=4 * 32 * 1024)
    write(short, MODEL)
    pulled(short)
    alone = {
        seed: generate(short, 0, n=3, seed=seed, max_tokens=33).arrays["tokens"].tolist()
        for seed in range(5)
    }
    before = short.stats()
    assert before.kv_bytes_max == 4 * 32 * 1024
    assert (before.blocks, before.block_bytes) == (4, 32 * 1024)
    for number in range(16):
        short.submit(call(f"g{number}", 0, n=3, seed=number % 5, max_tokens=33), None)
    found = finish(short)
    assert len(found) == 16
    for number in range(16):
        assert found[f"g{number}"].arrays["tokens"].tolist() == alone[number % 5]
    after = short.stats()
    assert after.preemptions > before.preemptions
    assert sum(each.result["metrics"]["preemptions"] for each in found.values()) == (
        after.preemptions - before.preemptions
    )
    assert after.tokens_recomputed > before.tokens_recomputed
    assert (after.running, after.waiting, after.blocks_held) == (0, 0, 0)
