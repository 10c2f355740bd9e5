"""One rollout instance: closed forms, conservation, and agreement with single steps."""

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plexrl.errors import InvalidRequestError, InvariantError
from plexrl.latency.costs import EngineCosts, read_costs
from plexrl.sim.rollout.engine.instance import Instance
from plexrl.sim.rollout.engine.trajectory import SimulatedTrajectory
from tests.examples import examples

COSTS = EngineCosts(kv_tokens=1000, kv_reserve=0.0)


def trajectory(number: int, tokens: int, prompt: int = 10) -> SimulatedTrajectory:
    return SimulatedTrajectory(
        number=number, group=number, prompt_tokens=prompt, response_tokens=tokens
    )


def drain(instance: Instance) -> None:
    while (due := instance.next_event_s()) is not None:
        instance.advance(due)
        instance.check_invariants()


def prefilled_s(costs: EngineCosts, tokens: int) -> float:
    """Matrix products by the tokens, attention by their square."""
    return costs.prefill_s_per_token * tokens + costs.prefill_s_per_token2 * tokens**2


def step_by_step(costs: EngineCosts, work: list[SimulatedTrajectory]) -> dict[int, float]:
    """End times by trajectory, one decode step at a time: an oracle without closed forms."""
    waiting, at_s = list(work), 0.0
    running: list[SimulatedTrajectory] = []
    done = {each.number: 0 for each in work}
    ended = {}

    def length(each: SimulatedTrajectory) -> int:
        return each.prompt_tokens + done[each.number]

    def admit() -> None:
        nonlocal at_s
        new: list[SimulatedTrajectory] = []
        while waiting:
            cached = sum(map(length, running + new))
            count = len(running) + len(new)
            if count and cached + length(waiting[0]) + count + 1 > costs.kv_tokens:
                break
            new.append(waiting.pop(0))
        at_s += sum(prefilled_s(costs, length(each)) for each in new)
        running.extend(new)

    admit()
    while running:
        at_s += costs.step_s(len(running), sum(map(length, running)))
        for each in running:
            done[each.number] += 1
        over = [each for each in running if done[each.number] == each.response_tokens]
        for each in over:
            ended[each.number] = at_s
            running.remove(each)
        if over:
            admit()
        while len(running) > 1 and sum(map(length, running)) + len(running) > costs.kv_tokens:
            waiting.insert(0, running.pop())
    return ended


def test_equal_lengths_take_the_closed_form() -> None:
    costs = EngineCosts()
    instance = Instance(0, costs)
    instance.route([trajectory(at, 1000, prompt=100) for at in range(20)], 0.0)
    drain(instance)
    prefill_s = 20 * prefilled_s(costs, 100)
    steps = [
        costs.k1 * 20 * (100 + step) + max(costs.k2, costs.k3 * 20) + costs.k4
        for step in range(1000)
    ]
    assert [each.finished_s for each in instance.finished] == pytest.approx(
        [prefill_s + sum(steps)] * 20
    )
    assert instance.prefill_s == pytest.approx(prefill_s)
    assert instance.decode_s == pytest.approx(sum(steps))
    assert instance.preemptions == 0


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.tuples(st.integers(1, 200), st.integers(1, 90)), min_size=1, max_size=25))
def test_events_agree_with_single_steps(work: list[tuple[int, int]]) -> None:
    instance = Instance(0, COSTS)
    instance.route([trajectory(at, tokens, prompt) for at, (tokens, prompt) in enumerate(work)], 0)
    drain(instance)
    wanted = step_by_step(
        COSTS, [trajectory(at, tokens, prompt) for at, (tokens, prompt) in enumerate(work)]
    )
    ended = {each.number: each.finished_s for each in instance.finished}
    assert ended == pytest.approx(wanted)


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(0, 10**6))
def test_random_commands_generate_every_token_once(seed: int) -> None:
    """Routes, interrupts and pulls at random times lose and repeat nothing."""
    random_numbers = random.Random(seed)
    instances = [Instance(number, COSTS) for number in range(3)]
    work = [trajectory(at, random_numbers.randint(1, 300)) for at in range(30)]
    held, now = list(work), 0.0
    for version in range(1, 40):
        now += random_numbers.expovariate(2.0)
        instance = random_numbers.choice(instances)
        if version % 7 == 0:
            held += instance.interrupt_all(now)
            instance.pull(version, now)
        elif version % 3 == 0:
            wanted = [each.number for each in instance.running()[::2]]
            wanted += [each.number for each in instance.waiting]
            held += instance.interrupt(wanted, now)
        else:
            instance.route(held, now)
            held = []
        instance.check_invariants()
    instances[0].route(held, now)
    for instance in instances:
        drain(instance)
    ended = [each for instance in instances for each in instance.finished]
    assert sorted(each.number for each in ended) == list(range(30))
    for each in ended:
        assert sum(segment.tokens for segment in each.segments) == each.response_tokens
        for one, other in zip(each.segments, each.segments[1:], strict=False):
            assert one.start_s <= one.end_s <= other.start_s


def test_a_full_cache_preempts_the_youngest_and_recomputes_it() -> None:
    instance = Instance(0, COSTS)
    instance.route([trajectory(0, 500), trajectory(1, 600)], 0.0)
    drain(instance)
    first, second = sorted(instance.finished, key=lambda each: each.number)
    assert instance.preemptions == 1
    assert (first.admissions, second.admissions) == (1, 2)
    # The second was preempted with 490 tokens of response: 2 · (10 + 490) = 1000.
    assert second.prefill_tokens == 10 + 10 + 490


def test_an_instance_with_work_does_not_pull() -> None:
    instance = Instance(0, COSTS)
    instance.route([trajectory(0, 5)], 0.0)
    with pytest.raises(InvariantError, match="pulls parameters with work"):
        instance.pull(1, 0.0)


def test_work_routed_during_a_pull_starts_after_it() -> None:
    instance = Instance(0, COSTS)
    end_s = instance.pull(3, 1.0)
    instance.route([trajectory(0, 5)], 2.0)
    drain(instance)
    (segment,) = instance.finished[0].segments
    assert segment.version == 3
    assert segment.start_s == pytest.approx(end_s + prefilled_s(COSTS, 10))


@settings(max_examples=examples(100), deadline=None)
@given(st.floats(0.0, 1e4), st.integers(1, 500), st.integers(0, 250_000))
def test_steps_within_is_the_inverse_of_their_duration(
    seconds: float, running: int, kv: int
) -> None:
    costs = EngineCosts()
    steps = costs.steps_within(seconds, running, kv)
    assert costs.steps_s(steps, running, kv) <= seconds < costs.steps_s(steps + 1, running, kv)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"k9": 1}', "unknown k9"),
        ('{"k1": -1}', "k1 is -1"),
        ('{"k1": "x"}', "k1 is 'x'"),
        ('{"kv_tokens": 1.5}', "kv_tokens is 1.5"),
        ('{"k2": 0, "k4": 0}', "a decode step takes time"),
        ("[]", "no JSON object"),
        ("{", "cannot read costs"),
    ],
)
def test_bad_costs_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(InvalidRequestError, match=message):
        read_costs(path)


def test_costs_of_a_file_replace_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text('{"k4": 0.02, "gpus": 2}')
    assert read_costs(path) == EngineCosts(k4=0.02, gpus=2)
