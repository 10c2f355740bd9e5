"""Plans from profiles: what is simulated, what is compared, and what is recommended."""

from dataclasses import replace

import pytest

from plexrl.client.data.rollout_profile import (
    PromptLengths,
    RolloutProfile,
    rollout_profile_from_json,
)
from plexrl.errors import InvalidRequestError
from plexrl.latency.models import QWEN25_7B
from plexrl.sim.rollout.plan.modes import SYNC, modes
from plexrl.sim.rollout.plan.planning import PlannedMode, ProfiledJob, plan_modes, recommend
from plexrl.sim.rollout.plan.profiled import profiled_setting
from plexrl.sim.rollout.results.outcome import outcome
from plexrl.sim.rollout.runs.run import simulate_rollout
from plexrl.sim.rollout.runs.split import runner
from plexrl.sim.rollout.workload import Prompts

PROFILE = RolloutProfile(
    prompts=4,
    samples=2,
    max_tokens=2000,
    lengths=tuple(
        PromptLengths(prompt_tokens=50, response_tokens=(base, base + 100))
        for base in (*range(100, 1100, 100), 1800)
    ),
    instances=3,
    instance_gpus=1,
    kv_tokens=60_000,
    trainer_gpus=1,
    k1=7e-8,
    k2=2e-3,
    k3=1e-4,
    k4=1e-2,
    measured_steps=100,
    train_s=12.0,
    sync_s=1.5,
)


def test_a_profile_survives_json() -> None:
    assert rollout_profile_from_json(PROFILE.to_json()) == PROFILE


@pytest.mark.parametrize("text", ["", "[]", '{"prompts": 1}', '{"prompts": "many"}'])
def test_other_text_is_refused_with_the_command_that_writes_a_profile(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="plexrl rollouts JOB --profile NAME"):
        rollout_profile_from_json(text)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("prompts", 0, "prompts of the profile is 0"),
        ("k1", -1.0, "k1 of the profile is -1"),
        ("lengths", (), "needs prompts with responses"),
    ],
)
def test_impossible_profiles_are_refused(field: str, value: object, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        replace(PROFILE, **{field: value})  # type: ignore[arg-type]


def test_the_simulated_job_has_the_measured_lengths_and_times() -> None:
    setting = profiled_setting(PROFILE)
    known = {each.response_tokens for each in PROFILE.lengths}
    prompts = Prompts(setting.workload)
    drawn = [{each.response_tokens for each in prompts.group(at)} for at in range(200)]
    assert all(any(group <= set(lengths) for lengths in known) for group in drawn)
    assert setting.gpus == 4
    assert setting.costs.step_s(1, 0) == pytest.approx(PROFILE.k2 + PROFILE.k4)
    tokens = [each.prompt_tokens * 2 + sum(each.response_tokens) for each in PROFILE.lengths]
    batch = PROFILE.prompts * sum(tokens) / len(tokens)
    assert setting.costs.train_s(batch, 1) == pytest.approx(PROFILE.train_s)


def test_prompts_with_one_response_are_one_distribution() -> None:
    lengths = tuple(PromptLengths(prompt_tokens=9, response_tokens=(at,)) for at in range(1, 401))
    setting = profiled_setting(replace(PROFILE, samples=1, lengths=lengths))
    prompts = Prompts(setting.workload)
    drawn = [prompts.group(at)[0].response_tokens for at in range(4000)]
    assert set(drawn) <= set(range(1, 401))
    assert sum(drawn) / 4000 == pytest.approx(200.5, rel=0.03)


def test_a_plan_compares_every_mode_with_the_synchronous_loop() -> None:
    asked = modes([1], has_model=False)
    with runner(1) as run:
        rows = plan_modes(run, ProfiledJob(profile=PROFILE), asked, [0, 1])
        again = plan_modes(run, ProfiledJob(profile=PROFILE), asked[:2], [0, 1])
    assert rows[:2] == again
    assert [each.mode for each in rows] == asked
    sync, *others = rows
    assert (sync.gain, sync.spread, sync.pays) == (1.0, 0.0, False)
    for each in rows:
        assert each.staleness_max <= each.mode.system.staleness
        total = each.rollout_gpus if each.shares_gpus else each.rollout_gpus + each.train_gpus
        assert total == 4
    ahead = next(each for each in others if each.mode.name == "streamrl-async")
    setting = profiled_setting(PROFILE, seed=0)
    system = replace(ahead.mode.system, rollout_gpus=ahead.rollout_gpus)
    runs = [
        outcome(setting, each, simulate_rollout(setting, each)) for each in (SYNC.system, system)
    ]
    first = runs[1].throughput / runs[0].throughput
    assert abs(first - ahead.gain) <= 2 * ahead.spread + 1e-9


def test_a_model_adds_sizes_and_the_adaptive_ones() -> None:
    job = ProfiledJob(profile=PROFILE, gpus=4, model=QWEN25_7B)
    assert job.sizes() == [1, 2]
    assert "pat" in [each.name for each in modes([1], has_model=True)]
    assert job.setting(0, 2).costs == QWEN25_7B.costs(2)


def row(name: str, gain: float, spread: float = 0.0, staleness: int = 0) -> PlannedMode:
    mode = next(each for each in modes([1, 2], has_model=False) if each.name == name)
    return PlannedMode(
        mode=mode,
        tensor_parallel=1,
        rollout_gpus=4,
        train_gpus=4,
        shares_gpus=True,
        gain=gain,
        spread=spread,
        staleness_max=staleness,
        tokens_per_s=1.0,
    )


def test_only_what_gains_more_than_its_spread_is_recommended() -> None:
    assert recommend([row("sync", 1.0), row("tail", 1.01), row("streamrl-skew", 1.2, 0.3)]) == []
    tail, ahead = row("tail", 1.3), row("staleflow η=2", 1.5)
    assert recommend([row("sync", 1.0), tail, ahead]) == [tail, ahead]
    assert recommend([row("sync", 1.0), tail, row("staleflow η=2", 1.1)]) == [tail]
