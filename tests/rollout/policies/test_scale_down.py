"""When instances are freed, against a search through all halves and a token-by-token projection."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plexrl.errors import InvalidRequestError
from plexrl.rollout.policies.scale_down import (
    RoundInstance,
    ScaleDown,
    ScaleDownSettings,
    UnfinishedSample,
    half_of,
)
from plexrl.rollout.trajectories.record import InstanceId

LIMIT = 40
SETTINGS = ScaleDownSettings(response_tokens_max=LIMIT)
NAMES = [InstanceId(each) for each in "abcdef"]


def instance(name: str, gpus: int = 1, kv_tokens: float = 100) -> RoundInstance:
    return RoundInstance(instance=InstanceId(name), gpus=gpus, kv_tokens=kv_tokens)


def sample(name: str | None, prompt: int = 1, response: int = 0) -> UnfinishedSample:
    at = None if name is None else InstanceId(name)
    return UnfinishedSample(instance=at, prompt_tokens=prompt, response_tokens=response)


fleets = st.lists(
    st.builds(
        RoundInstance,
        instance=st.sampled_from(NAMES),
        gpus=st.sampled_from((1, 2, 4, 8)),
        kv_tokens=st.sampled_from((30.0, 60.0, 200.0)),
        is_with_trainer=st.booleans(),
    ),
    max_size=6,
    unique_by=lambda each: each.instance,
)
left = st.lists(
    st.builds(
        UnfinishedSample,
        instance=st.sampled_from([*NAMES, None]),
        prompt_tokens=st.integers(1, 20),
        response_tokens=st.integers(0, LIMIT - 1),
    ),
    max_size=8,
)
past = st.lists(st.integers(1, LIMIT), max_size=12)


def step_by_step(lengths: list[int], unfinished: list[UnfinishedSample]) -> int:
    """The peak of the KV cache, by generating one token at a time."""
    finals = []
    for each in unfinished:
        longer = [length for length in lengths if length > each.response_tokens]
        final = LIMIT
        while longer and (final - 1) * len(longer) >= sum(longer):
            final -= 1
        finals.append(final)
    peak = 0
    for step in range(LIMIT + 1):
        alive = [
            each.prompt_tokens + each.response_tokens + step
            for each, final in zip(unfinished, finals, strict=True)
            if each.response_tokens + step <= final
        ]
        peak = max(peak, sum(alive))
    return peak


def best_half(fleet: list[RoundInstance], unfinished: list[UnfinishedSample]) -> set[str] | None:
    """The half that costs least, by trying all sets of instances."""
    half = sum(each.gpus for each in fleet) // 2
    found = []
    for count in range(1, len(fleet)):
        for chosen in combinations(fleet, count):
            if sum(each.gpus for each in chosen) == half:
                names = {str(each.instance) for each in chosen}
                lost = [s for s in unfinished if s.instance in names]
                tokens = sum(s.prompt_tokens + s.response_tokens for s in lost)
                kv = sum(each.kv_tokens for each in chosen)
                others = sum(each.gpus for each in chosen if not each.is_with_trainer)
                found.append((others, kv, tokens, sorted(names, reverse=True)))
    return set(min(found)[3]) if found else None


@given(fleets, left, past, st.integers(1, 200), st.integers(1, 200))
def test_half_is_freed_if_whole_instances_make_it_up_and_what_is_left_fits(
    fleet: list[RoundInstance],
    unfinished: list[UnfinishedSample],
    lengths: list[int],
    samples: int,
    generated: int,
) -> None:
    core = ScaleDown(SETTINGS)
    freed = core.decide(generated, samples, fleet, unfinished, lengths)

    half = best_half(fleet, unfinished)
    kept = sum(each.kv_tokens for each in fleet if each.instance not in (half or ()))
    fits = step_by_step(lengths, unfinished) <= kept
    is_time = 0.2 <= generated / samples <= 0.5
    assert set(freed) == (half if half and fits and is_time else set())
    assert list(freed) == sorted(freed)


@given(fleets, left, st.permutations(range(6)), st.permutations(range(8)))
def test_the_order_of_instances_and_samples_does_not_matter(
    fleet: list[RoundInstance], unfinished: list[UnfinishedSample], one: list[int], two: list[int]
) -> None:
    mixed = [fleet[each] for each in one if each < len(fleet)]
    shuffled = [unfinished[each] for each in two if each < len(unfinished)]
    assert half_of(mixed, shuffled) == half_of(fleet, unfinished)


@given(fleets, left, past, st.lists(st.integers(1, 8), max_size=30), st.integers(20, 60))
def test_a_round_frees_once_and_is_looked_at_each_further_twentieth(
    fleet: list[RoundInstance],
    unfinished: list[UnfinishedSample],
    lengths: list[int],
    steps: list[int],
    samples: int,
) -> None:
    core, generated, freed, looks = ScaleDown(SETTINGS), 0, 0, [0]
    for step in steps:
        generated += step
        is_due = core.is_due(generated, samples)
        assert not (is_due and freed)
        if is_due:
            assert (generated - looks[-1]) / samples >= 0.05
            looks.append(generated)
        freed += bool(core.decide(generated, samples, fleet, unfinished, lengths))
    assert freed <= 1
    core.begin_round()
    again = ScaleDown(SETTINGS)
    now = -(-samples // 4)
    assert core.decide(now, samples, fleet, unfinished, lengths) == again.decide(
        now, samples, fleet, unfinished, lengths
    )


def test_a_second_look_frees_what_did_not_fit_at_the_first() -> None:
    core, fleet = ScaleDown(SETTINGS), [instance("a"), instance("b")]
    assert core.decide(2, 10, fleet, [sample("a", response=20)] * 8, [21]) == ()
    assert core.decide(2, 10, fleet, [sample("a", response=20)] * 4, [21]) == ()
    assert core.decide(3, 10, fleet, [sample("a", response=20)] * 4, [21]) == ("b",)
    assert core.decide(4, 10, fleet, [], [21]) == ()


def test_a_tensor_parallel_group_is_not_split() -> None:
    core = ScaleDown(SETTINGS)
    assert core.decide(3, 10, [instance("a", gpus=4)], [], []) == ()
    assert core.decide(4, 10, [instance("a", gpus=4), instance("b", gpus=2)], [], []) == ()
    three = [instance("a", gpus=2), instance("b", gpus=1), instance("c", gpus=1)]
    assert core.decide(5, 10, three, [], []) == ("a",)


def test_without_a_longer_past_response_a_sample_is_expected_at_the_limit() -> None:
    core = ScaleDown(SETTINGS)
    assert core.projected_peak([sample("a", prompt=5, response=7)], [7]) == 5 + LIMIT
    assert core.projected_peak([sample("a", prompt=5, response=6)], [7]) == 5 + 7
    assert core.projected_peak([], [7]) == 0


@pytest.mark.parametrize("wrong", [{"response_tokens_max": 0}, {"first_percent": 60}])
def test_wrong_settings_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(InvalidRequestError):
        ScaleDownSettings(**{"response_tokens_max": 9, **wrong})


def test_it_looks_again_when_a_step_of_the_samples_is_generated_and_not_before() -> None:
    core = ScaleDown(
        ScaleDownSettings(
            response_tokens_max=LIMIT, first_percent=20, last_percent=80, step_percent=10
        )
    )
    core.begin_round()
    assert [core.is_due(generated, 100) for generated in (19, 20, 80, 81)] == [
        False,
        True,
        True,
        False,
    ]
    core.decide(20, 100, [], [], [])
    assert [core.is_due(generated, 100) for generated in (29, 30)] == [False, True]
