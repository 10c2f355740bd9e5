"""Paced engines: tokens by seed, and the simulator's time for what they draw."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plexrl.errors import InvalidRequestError
from plexrl.latency.pace import parse_pace
from plexrl.wire.operations import SamplingParams
from plexrl.worker.rollout.generation import LENGTH, STOP, Generation
from plexrl.worker.rollout.paced.engine import PacedEngine
from tests.worker.paced.clock import Clock

PACE = "h800:qwen2.5-14b@0.1"
EOS = 2


class Engine:
    """An engine on a clock of its own."""

    def __init__(self, pace: str = PACE, *, slots: int = 64, word: int = 7, tp: int = 2) -> None:
        self.clock, self.word = Clock(), word
        found = parse_pace(pace)
        self.decoding = found.decoding(tp)
        self.engine = PacedEngine(
            self.decoding,
            self.clock.pacer(found.scale),
            weights=lambda: self.word,
            vocabulary=50,
            ends=frozenset([EOS]),
            sequence_tokens_max=100_000,
            slots=slots,
        )

    def finish(self, *generations: Generation) -> None:
        for each in generations:
            self.engine.submit(each)
        while self.engine.has_work:
            self.engine.step()


def generation(
    name: str = "g", *, prompts: int = 2, n: int = 3, seed: int = 1, most: int = 200, drawn: int = 0
) -> Generation:
    return Generation(
        name=name,
        prompts=[[5] * (4 + drawn) for _ in range(prompts)],
        samples_per_prompt=n,
        sampling=SamplingParams(max_tokens=most, seed=seed, drawn_tokens=drawn),
        emit=None,
        weights_seq=1,
    )


def tokens_of(found: Generation) -> list[list[int]]:
    return [row.tolist() for row in found.tokens]


def test_samples_depend_on_seed_and_weights_and_not_on_company() -> None:
    alone, together, other = generation(), generation(), generation("h", seed=9)
    Engine().finish(alone)
    Engine(slots=2).finish(other, together)
    assert tokens_of(alone) == tokens_of(together)
    assert [list(row) for row in alone.logprobs] == [list(row) for row in together.logprobs]
    new_weights, new_seed = generation(), generation(seed=2)
    Engine(word=8).finish(new_weights)
    Engine().finish(new_seed)
    assert tokens_of(new_weights) != tokens_of(alone) != tokens_of(new_seed)


def test_a_response_ends_at_the_limit_or_with_the_end_token() -> None:
    found = generation(prompts=40, n=5)
    Engine().finish(found)
    assert {*found.finish} == {STOP, LENGTH}
    for row, finish in zip(tokens_of(found), found.finish, strict=True):
        assert EOS not in row[:-1]
        assert (row[-1] == EOS) == (finish == STOP)
        assert len(row) == 200 if finish == LENGTH else len(row) < 200


@settings(deadline=None)
@given(cut=st.integers(1, 40), seed=st.integers(0, 1000))
def test_a_response_that_is_continued_has_the_tokens_of_one_that_is_not(
    cut: int, seed: int
) -> None:
    whole = generation(prompts=1, n=1, seed=seed)
    Engine().finish(whole)
    tokens = tokens_of(whole)[0]
    if cut >= len(tokens):
        return
    rest = generation(prompts=1, n=1, seed=seed, most=200 - cut, drawn=cut)
    Engine().finish(rest)
    assert tokens_of(rest)[0] == tokens[cut:]


def test_one_response_takes_its_prefill_and_its_steps() -> None:
    made, found = Engine(), generation(prompts=1, n=1)
    made.finish(found)
    drawn = len(found.tokens[0])
    wanted_s = made.decoding.prefill_s(4) + made.decoding.steps_s(drawn, 1, 4, drawn)
    assert sum(made.clock.sleeps) == pytest.approx(0.1 * wanted_s)


def test_the_longest_response_of_a_published_rollout_takes_all_of_its_time() -> None:
    made, found = Engine("published:7b@0.1"), generation(prompts=8, n=4)
    made.finish(found)
    rollout_s = 289.03 - 9.66 - 38.08 - 9.76
    assert sum(made.clock.sleeps) == pytest.approx(0.1 * rollout_s)


def test_responses_that_do_not_fit_the_cache_are_preempted_and_finish_alike() -> None:
    # 80 GB of one H800 leave 42 GB beside the weights: 210 000 tokens of 196 608 bytes.
    spacious, crowded = (generation(prompts=40, n=1, most=60_000) for _ in range(2))
    Engine("h800:qwen2.5-14b@0.0001", tp=8).finish(spacious)
    narrow = Engine("h800:qwen2.5-14b@0.0001", tp=1)
    narrow.finish(crowded)
    assert narrow.engine.stats().preemptions > 0 == spacious.preemptions
    assert tokens_of(crowded) == tokens_of(spacious)


def test_new_weights_draw_the_tokens_after_the_pull() -> None:
    made, found = Engine(), generation(prompts=1, n=1)
    made.engine.submit(found)
    made.engine.step()
    made.word = 8
    made.engine.weights_changed(4)
    made.finish()
    assert [each.weights_seq for each in found.segments[0]] == [1, 4]


def test_stop_parameters_are_refused() -> None:
    found = generation()
    found.sampling = SamplingParams(seed=1, stop_token_ids=(4,))
    with pytest.raises(InvalidRequestError, match="leave the stop parameters out"):
        Engine().engine.submit(found)
