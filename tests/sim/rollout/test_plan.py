"""Plans from profiles: what is simulated, what is compared, and what is recommended."""

import inspect
from dataclasses import fields, replace
from typing import Any

import pytest

import plexrl
from plexrl.client.data.rollout_policy import MODES, PolicyFields, policy_fields
from plexrl.client.data.rollout_profile import (
    PromptLengths,
    RolloutProfile,
    rollout_profile_from_json,
)
from plexrl.errors import InvalidRequestError
from plexrl.latency.models import QWEN25_7B
from plexrl.rollout.service.order import RolloutOrder
from plexrl.sim.rollout.plan.modes import SYNC, Mode, modes
from plexrl.sim.rollout.plan.planning import PlannedMode, ProfiledJob, plan_modes, recommend
from plexrl.sim.rollout.plan.profiled import profiled_setting
from plexrl.sim.rollout.results.outcome import outcome
from plexrl.sim.rollout.runs.run import simulate_rollout
from plexrl.sim.rollout.runs.split import runner
from plexrl.sim.rollout.setting import ON_POLICY, SystemName
from plexrl.sim.rollout.systems.coordinated import policy_of
from plexrl.sim.rollout.systems.pat.profile import decode_profile
from plexrl.sim.rollout.workload import Prompts
from plexrl.wire.operations import SamplingParams

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


ON = {
    "sync": set(),
    "tail, prompts": {"over_launch"},
    "tail": {"over_launch"},
    "streamrl-skew": {"length_aware"},
    "streamrl-sync": {"length_aware"},
    "streamrl-async": {"length_aware", "staleness"},
    "pat": {"adaptive_tp"},
    "staleflow η=1": {"staleness"},
    "staleflow η=2": {"staleness"},
}
"""The modes of a policy that each planned mode has on."""


@pytest.mark.parametrize("mode", modes([1, 2], has_model=True), ids=lambda each: each.name)
def test_what_is_printed_is_what_a_live_rollout_accepts_and_what_was_simulated(mode: Mode) -> None:
    job = ProfiledJob(profile=PROFILE, gpus=8, model=QWEN25_7B)
    for size in job.sizes_of(mode):
        shares = mode.system.name in ON_POLICY
        planned = replace(
            row("sync", 1.0),
            mode=mode,
            tensor_parallel=size,
            rollout_gpus=8 if shares else 4,
            shares_gpus=shares,
            tp_sizes=job.tp_sizes(size) if mode.system.name == SystemName.PAT else (),
        )
        lines = [line for line in planned.python if not line.startswith("for ")]
        profile = decode_profile(job.setting(0, size), QWEN25_7B)
        known = {"plexrl": plexrl, "profile": profile}
        given = eval(f"dict({', '.join(lines)})", known)
        # These are arguments of `job.rollout`.
        assert given.keys() <= inspect.signature(plexrl.Job.rollout).parameters.keys()
        order = RolloutOrder(
            job="job",
            name="rollout",
            source="actor",
            instances=tuple(f"rollout-{at}" for at in range(given["instances"])),
            prompts=4,
            samples=2,
            sampling=SamplingParams(seed=1),
            **vars_of(policy_fields(given["policy"])),
        )
        assert {name for name, is_on in MODES.items() if is_on(order)} == ON[mode.name]
        instance_gpus = given["parallelism"].world_size
        assert given["instances"] * instance_gpus == planned.rollout_gpus
        assert given.get("shares_gpus", False) == shares
        if mode.system.name == SystemName.PAT:
            assert given["tp_sizes"] == profile.subject.tp_sizes
            assert len(given["tp_sizes"]) > 1
            assert given["parallelism"].tp == given["tp_sizes"][-1]
            assert order.settings().adaptive_tp is not None
        else:
            assert given["policy"] == policy_of(mode.system)
            assert instance_gpus == size


def vars_of(found: PolicyFields) -> dict[str, Any]:
    return {each.name: getattr(found, each.name) for each in fields(found)}


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
