"""PAT on the virtual clock: printed latencies, switches, and what they may cost."""

from dataclasses import replace

import pytest

from plexrl.errors import InvalidRequestError
from plexrl.latency.gpus import A40, H100, Switching
from plexrl.latency.models import LLAMA31_8B, Model
from plexrl.rollout.policies.adaptive_tp.predictor import LatencyPredictor
from plexrl.sim.rollout.engine.instance import Instance
from plexrl.sim.rollout.engine.trajectory import SimulatedTrajectory
from plexrl.sim.rollout.results.outcome import RolloutOutcome, outcome
from plexrl.sim.rollout.runs.run import simulate_rollout
from plexrl.sim.rollout.setting import Ends, Setting, System, SystemName
from plexrl.sim.rollout.systems.pat.profile import decode_profile
from plexrl.sim.rollout.workload import DEEPSCALER, DEEPSCALER_TAIL, Prompts, RolloutWorkload

ON_A40 = replace(LLAMA31_8B, gpu=A40)
PAT = System(name=SystemName.PAT)
LIMIT = System(name=SystemName.PAT, ends=Ends.LIMIT)
ORACLE = System(name=SystemName.PAT, ends=Ends.KNOWN)
SYNC = System(name=SystemName.SYNC)


def setting(model: Model = ON_A40, *, tp: int = 2, gpus: int = 8, limit: int = 8192) -> Setting:
    return Setting(
        gpus=gpus,
        batch_groups=32,
        steps=2,
        warmup_steps=0,
        workload=RolloutWorkload(lengths=DEEPSCALER, scale=1.0, limit=limit, group_size=1),
        costs=model.costs(tp),
        model=model,
    )


def switching(fixed_s: float, kv_bytes_per_s: float = 1e12) -> Model:
    gpu = replace(A40, switching=Switching(fixed_s=fixed_s, kv_bytes_per_s=kv_bytes_per_s))
    return replace(LLAMA31_8B, gpu=gpu)


def figures(asked: Setting, system: System) -> RolloutOutcome:
    return outcome(asked, system, simulate_rollout(asked, system))


@pytest.mark.parametrize(
    ("tp", "rows", "paper_ms"), [(2, 1, 15.37), (8, 1, 9.64), (2, 128, 24.41), (8, 128, 30.87)]
)
def test_decode_steps_take_what_the_paper_measured(tp: int, rows: int, paper_ms: float) -> None:
    costs = ON_A40.costs(tp)
    each = rows // (8 // tp) or 1
    context = 1020 if rows > 1 else 0
    assert 1e3 * costs.step_s(each, each * context) == pytest.approx(paper_ms, rel=0.01)


def test_a_switch_takes_what_the_paper_measured() -> None:
    """9 responses of 12 288 tokens in groups of 2: the largest has 3."""
    predictor = LatencyPredictor(decode_profile(setting(limit=16_384), ON_A40))
    move_s = predictor.move_s(2, 8, 3 * 12_288)
    assert move_s == pytest.approx(2.36, rel=0.01)
    assert move_s + predictor.profile.switch_s == pytest.approx(5.52, rel=0.01)


def test_lengths_have_the_published_tail_and_mean() -> None:
    prompts = Prompts(RolloutWorkload(lengths=DEEPSCALER, scale=1.0, limit=24_576, group_size=1))
    lengths = [prompts.group(at)[0].response_tokens for at in range(20_000)]
    for tokens, part in DEEPSCALER_TAIL.items():
        assert sum(each > tokens for each in lengths) / 20_000 == pytest.approx(part, abs=0.005)
    assert sum(lengths) / 20_000 == pytest.approx(3445, rel=0.03)


@pytest.mark.parametrize("system", [PAT, LIMIT, ORACLE], ids=lambda each: each.label)
def test_a_switch_that_costs_too_much_never_happens(system: System) -> None:
    for tp in (1, 2, 4, 8):
        asked = setting(switching(1e9), tp=tp)
        adaptive, static = figures(asked, system), figures(asked, SYNC)
        assert adaptive.run_s == pytest.approx(static.run_s)
        assert adaptive.rollout_s == pytest.approx(static.rollout_s)


def test_a_free_switch_is_never_slower_than_the_best_static_size() -> None:
    model = switching(0.0)
    oracle = figures(setting(model), ORACLE).rollout_s
    for tp in (1, 2, 4, 8):
        # Groups pause for the end of a step of the others, and a prefill is not predicted.
        assert oracle <= 1.01 * figures(setting(model, tp=tp), SYNC).rollout_s


@pytest.mark.parametrize("gpus", [4, 8, 16])
@pytest.mark.parametrize("fixed_s", [0.0, 3.0])
def test_every_response_is_trained_once_with_all_of_its_tokens(gpus: int, fixed_s: float) -> None:
    asked = setting(switching(fixed_s), gpus=gpus)
    recorder = simulate_rollout(asked, PAT)
    assert len(recorder.trained_numbers) == asked.steps * asked.batch_trajectories
    assert all(set(step.staleness) == {0} for step in recorder.steps)
    prompts = Prompts(asked.workload)
    lengths = [prompts.group(at)[0].response_tokens for at in range(64)]
    assert sum(step.response_tokens for step in recorder.steps) == sum(lengths)
    assert recorder.rollout_gpus == gpus


def test_a_batch_that_drains_moves_its_kv_caches_to_larger_groups() -> None:
    recorder = simulate_rollout(setting(), PAT, with_history=True)
    assert sum(len(each.segments) for each in recorder.lanes) > recorder.admissions


def test_equal_seeds_give_equal_runs() -> None:
    assert figures(setting(), PAT) == figures(setting(), PAT)


def test_resumed_trajectories_need_no_prefill() -> None:
    costs = replace(ON_A40.costs(2), kv_tokens=1000)
    first, second = Instance(0, costs), Instance(1, costs)
    rows = [
        SimulatedTrajectory(number=at, group=at, prompt_tokens=100, response_tokens=300)
        for at in range(3)
    ]
    first.route(rows, 0.0)
    first.advance(1.0)
    stopped = first.interrupt_all(1.0)
    prefill_s = first.prefill_s
    second.resume(stopped, first.stopped_s + 2.0)
    second.check_invariants()
    while (due := second.next_event_s()) is not None:
        second.advance(due)
        second.check_invariants()
    assert prefill_s > 0.0
    assert second.preemptions == 1, "1200 tokens do not fit"
    assert {each.number for each in second.finished} == {0, 1, 2}
    assert all(sum(part.tokens for part in each.segments) == 300 for each in rows)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"model": None}, "give a model"), ({"gpus": 12}, "up to 8, or whole nodes")],
)
def test_impossible_settings_are_refused(changes: dict[str, object], message: str) -> None:
    asked = replace(setting(), **changes)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match=message):
        simulate_rollout(asked, PAT)


def test_groups_of_two_on_an_h100_take_the_baseline_times_of_the_paper() -> None:
    model = replace(LLAMA31_8B, gpu=H100)
    asked = replace(setting(model, limit=24_576), batch_groups=128, steps=8)
    recorder, prompts, times = simulate_rollout(asked, SYNC), Prompts(asked.workload), []
    begin_s = 0.0
    for step in recorder.steps:
        batch = range(128 * step.version, 128 * (step.version + 1))
        if max(prompts.group(at)[0].response_tokens for at in batch) == 24_576:
            times.append(step.start_s - begin_s)
        begin_s = step.end_s
    assert sum(times) / len(times) == pytest.approx(134.3, rel=0.1)
