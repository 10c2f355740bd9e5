"""How much short rounds start beyond what is trained, by simulated rounds and in a fleet."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from plexrl.rollout.coordinator.messages import PolicyChanged
from plexrl.rollout.instances.cost_model import QWEN3_30B_A3B_ON_H20 as MODEL
from plexrl.rollout.policies.tail_batching.over_launch import (
    GAIN_MIN,
    SIMULATED_MAX,
    STEPS_MAX,
    Extra,
    RoundSetting,
    SeenPrompt,
    _SimulatedRound,
    batch_s,
    choose_extra,
)
from plexrl.rollout.staleness.manager import StalenessSettings
from plexrl.rollout.trajectories.record import TrajectoryId
from tests.examples import examples
from tests.rollout.batching.test_tail_batching import trained_groups
from tests.rollout.fleet import Fleet
from tests.rollout.history import settings_from

MOST = Extra(4, 2)
NONE = Extra(0, 0)


def setting(instances: int, prompts: int = 16, samples: int = 4) -> RoundSetting:
    return RoundSetting(
        model=MODEL,
        kv_budgets=[257_000.0] * instances,
        batch_groups=prompts,
        group_size=samples,
    )


def seen(*lengths: Sequence[int]) -> list[SeenPrompt]:
    return [SeenPrompt(100, tuple(each)) for each in lengths]


LONG_TAIL = seen(*[[500] * 4] * 15, [8_000] * 4)
EQUAL = seen(*[[4_000] * 4] * 16)


def test_a_long_tail_on_idle_instances_is_deferred() -> None:
    chosen = choose_extra(setting(instances=8), MOST, LONG_TAIL)
    assert chosen.extra.groups == MOST.groups
    assert chosen.gain > 1.5


def test_nothing_is_started_beyond_the_need_where_all_end_together() -> None:
    chosen = choose_extra(setting(instances=8), MOST, EQUAL)
    assert chosen.extra == NONE
    assert chosen.gain < GAIN_MIN


def test_nothing_is_started_beyond_the_need_on_busy_instances() -> None:
    """With 256 prompts an instance has hundreds of samples until the longest ones end."""
    spread = seen(*[[tokens] * 4 for tokens in range(3_000, 6_000, 200)])
    busy, idle = setting(instances=1, prompts=256), setting(instances=64, prompts=256)
    assert choose_extra(busy, Extra(64, 1), spread).extra == NONE
    assert choose_extra(idle, Extra(64, 1), spread).extra != NONE


def test_the_choice_for_a_large_batch_is_that_for_a_part_of_it() -> None:
    for times in (1, 7, 64, 1024):
        case = setting(instances=8 * times, prompts=16 * times)
        chosen = choose_extra(case, Extra(4 * times, 2), LONG_TAIL)
        assert chosen.extra.groups == 4 * times
        assert chosen.gain > 1.5
        chosen = choose_extra(case, Extra(4 * times, 2), EQUAL)
        assert chosen.extra == NONE


@pytest.mark.parametrize(
    "case",
    [
        setting(8, prompts=65_536, samples=64),
        setting(8, prompts=1, samples=65_536),
        replace(setting(8, prompts=512, samples=16), kv_budgets=[60_000.0] * 8),
        replace(setting(1, prompts=512, samples=16), kv_budgets=[1.0]),
    ],
)
def test_the_work_of_a_choice_is_bounded(
    case: RoundSetting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rollouts of a service wait for it."""
    done, advance = [0], _SimulatedRound.advance

    def counted(simulated: _SimulatedRound) -> None:
        done[0] += simulated.complete_s.size * (case.group_size + 4)
        advance(simulated)

    monkeypatch.setattr(_SimulatedRound, "advance", counted)
    past = [SeenPrompt(500, (100 * (1 + at % 37), 5_000 + 100 * at)) for at in range(256)]
    choose_extra(case, Extra(case.batch_groups, 4), past)
    assert done[0] <= 10 * STEPS_MAX * 2 * SIMULATED_MAX


def test_nothing_is_started_beyond_the_need_where_rounds_take_no_time() -> None:
    assert choose_extra(setting(2), MOST, seen([0, 0], [0])).extra == NONE


@pytest.mark.parametrize("case", [(setting(0), LONG_TAIL), (setting(8), [])])
def test_nothing_is_started_beyond_the_need_while_nothing_is_known(
    case: tuple[RoundSetting, list[SeenPrompt]],
) -> None:
    assert choose_extra(case[0], MOST, case[1]).extra == NONE


@given(
    lengths=st.lists(st.lists(st.integers(1, 5_000), min_size=2, max_size=2), min_size=1),
    instances=st.integers(1, 4),
    prompts=st.integers(1, 8),
    groups=st.integers(0, 4),
    samples=st.integers(0, 2),
)
@hypothesis_settings(max_examples=examples(100), deadline=None)
def test_a_choice_is_allowed_and_sooner_than_none_by_the_cost_model(
    lengths: list[list[int]], instances: int, prompts: int, groups: int, samples: int
) -> None:
    case, most, past = setting(instances, prompts, 2), Extra(groups, samples), seen(*lengths)
    chosen = choose_extra(case, most, past)
    assert chosen.extra.groups in (0, groups)
    assert chosen.extra.samples in (0, samples)
    if chosen.extra != NONE:
        assert batch_s(case, chosen.extra, past) <= batch_s(case, NONE, past) / GAIN_MIN


@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=8),
    instances=st.integers(1, 3),
    prompts=st.integers(1, 12),
)
@hypothesis_settings(max_examples=examples(60), deadline=None)
def test_a_round_takes_as_long_as_its_steps(
    lengths: list[int], instances: int, prompts: int
) -> None:
    """All prompts have the same samples, so that each instance has them in turn."""
    case, past = setting(instances, prompts, len(lengths)), seen(lengths)
    dealt = [(lengths * prompts)[at::instances] for at in range(instances)]
    assert batch_s(case, NONE, past) == pytest.approx(max(map(steps_s, dealt)), rel=0.05)


def steps_s(lengths: list[int]) -> float:
    """Seconds of one instance, each step by itself."""
    seconds = 0.0
    for step in range(max(lengths, default=0)):
        running = sum(each > step for each in lengths)
        seconds += MODEL.step_s(running * (100 + step), running)
    return seconds


def fleet_of(batch_groups: int = 2, extra_groups: int = 1) -> Fleet:
    """Prompts of two samples, on an engine that decodes all samples in a step."""
    bound = StalenessSettings(
        staleness=0,
        batch_groups=batch_groups,
        group_size=2,
        extra_groups=extra_groups,
        extra_samples=1,
    )
    fleet = Fleet(
        replace(
            settings_from(Random(1)),
            staleness=bound,
            routing="count",
            fixed_over_launch=False,
            cost_model=MODEL,
        )
    )
    fleet.join(10_000)
    return fleet


def set_lengths(fleet: Fleet, long: int) -> None:
    """Every fourth prompt has samples of so many tokens, the others of one."""
    ids = fleet.settings.staleness.ids_per_group
    for each in range(80 * ids):
        fleet.lengths[TrajectoryId(each)] = 1 if each // ids % 4 else long


def test_the_first_round_starts_what_it_trains_and_the_next_ones_what_gains() -> None:
    fleet = fleet_of(batch_groups=4, extra_groups=2)
    set_lengths(fleet, long=400)
    fleet.add_groups()
    assert len(fleet.core.trajectories.groups) == 4
    while not fleet.trained:
        fleet.round(tokens=50)
    assert fleet.core.rounds.extra.groups == 2
    while not fleet.core.rounds.queue:
        fleet.round(tokens=50)


def test_equal_lengths_are_trained_in_their_order() -> None:
    fleet = fleet_of()
    set_lengths(fleet, long=1)
    while len(fleet.trained) < 5:
        fleet.round()
        assert fleet.core.rounds.extra == NONE
    assert trained_groups(fleet) == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]


@pytest.mark.parametrize("restarts", [False, True])
def test_every_prompt_is_trained_once_whatever_is_chosen(restarts: bool) -> None:
    fleet = fleet_of(batch_groups=4, extra_groups=2)
    fleet.prompts = 40
    set_lengths(fleet, long=400)
    extras = set[Extra]()
    for _ in range(600):
        fleet.add_groups()
        fleet.round(tokens=50)
        extras.add(fleet.core.rounds.extra)
        if restarts:
            fleet.restart()
        if len(fleet.trained) == 10:
            break
    assert sorted(each for groups in trained_groups(fleet) for each in groups) == [*range(40)]
    assert len(extras) > 1


@pytest.mark.parametrize("is_fixed", [False, True])
def test_a_policy_may_fix_the_over_launch_or_leave_it_to_the_lengths(is_fixed: bool) -> None:
    """The present round goes on with what it has started."""
    fleet = fleet_of()
    set_lengths(fleet, long=1)
    bound = fleet.settings.staleness
    fleet.handle(PolicyChanged(bound=bound, routing="count", fixed_over_launch=not is_fixed))
    fleet.add_groups()
    before = fleet.core.rounds.extra
    fleet.handle(PolicyChanged(bound=bound, routing="count", fixed_over_launch=is_fixed))
    fleet.add_groups()
    fleet.core.check_invariants()
    assert fleet.core.rounds.extra == (Extra(1, 1) if is_fixed else before)
    while len(fleet.trained) < 2:
        fleet.round()
    assert (fleet.core.rounds.held.chosen is None) is is_fixed
