"""Paced engines: tokens by seed, and the simulator's time for what they draw."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plexrl.errors import InvalidRequestError
from plexrl.latency.pace import parse_pace
from plexrl.wire.operations import SamplingParams
from plexrl.worker.rollout.generation import LENGTH, STOP, Generation
from plexrl.worker.rollout.paced.engine import PASS_S, PacedEngine
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


def test_the_cache_holds_no_more_than_it_has_room_for() -> None:
    made = Engine("h20:qwen2.5-32b@0.0001", tp=1, slots=256)
    found = generation(prompts=128, n=1, most=8192)
    found.sampling = SamplingParams(max_tokens=8192, seed=1, ignore_eos=True)
    made.finish(found)
    stats = made.engine.stats()
    assert found.preemptions > 0
    assert 0.9 * stats.blocks < found.blocks_max <= stats.blocks
    # 96 GB, of which a tenth is free and 65.5 GB are weights.
    assert stats.kv_bytes_max == pytest.approx(0.9 * 96e9 - 65.52e9, rel=1e-3)


@pytest.mark.parametrize("pace", ["h800:qwen2.5-7b@1", "published:7b@1"])
def test_calls_are_answered_during_a_long_prefill_and_a_long_step(pace: str) -> None:
    made, found = Engine(pace), generation(prompts=64, n=1, most=16)
    found.prompts = [[5] * 8192] * 64
    made.finish(found)
    assert max(made.clock.sleeps) <= PASS_S
    assert sum(made.clock.sleeps) > 5.0


def test_a_response_that_is_aborted_in_its_prefill_leaves_no_debt() -> None:
    made, long, short = Engine(), generation(prompts=1, drawn=50_000), generation("h", prompts=1)
    made.engine.submit(long)
    made.engine.step()
    made.engine.abort("g")
    slept_s = sum(made.clock.sleeps)
    assert slept_s == pytest.approx(PASS_S)
    made.finish(short)
    alone = Engine()
    alone.finish(generation("h", prompts=1))
    assert sum(made.clock.sleeps) - slept_s == pytest.approx(sum(alone.clock.sleeps))


def test_a_published_response_that_is_continued_takes_the_time_that_is_left_of_it() -> None:
    made = Engine("published:7b@0.1")
    whole = generation(prompts=1, n=1, most=64)
    made.engine.submit(whole)
    while len(whole.segments[0]) == 0 or made.clock.now_s < 12.0:
        made.engine.step()
    half = made.engine.interrupt("g")
    assert half is not None
    cut = len(half.tokens[0])
    assert 0 < cut < 64
    made.finish(generation("rest", prompts=1, n=1, most=64 - cut, drawn=cut))
    rollout_s = 289.03 - 9.66 - 38.08 - 9.76
    # A step that is interrupted is drawn again.
    assert sum(made.clock.sleeps) == pytest.approx(0.1 * rollout_s, rel=1 / cut)


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
