"""The simulated setting of a running rollout, from its profile. Pure."""

from statistics import fmean

from plexrl.client.data.rollout_profile import RolloutProfile
from plexrl.latency.costs import EngineCosts
from plexrl.latency.models import DECODE_COMPUTE, PREFILL_COMPUTE, Model
from plexrl.sim.rollout.setting import Setting
from plexrl.sim.rollout.workload import RolloutWorkload

STEPS = 16
WARMUP_STEPS = 4
"""12 steps are measured: whole numbers of the periods of η + 1 steps for η up to 3."""
CYCLE_S_MIN = 0.2
"""Interval of a live rollout's snapshots."""
CYCLE_S_MAX = 5.0
"""Where responses take minutes, fewer snapshots decide the same in less time."""


def profiled_costs(profile: RolloutProfile) -> EngineCosts:
    """The measured latencies.

    A prefill is not measured: its matrix products are those of a decode step for as many samples,
    at the usual part of the peak. Training takes time by the number of tokens.
    """
    each = profile.lengths
    per_prompt = fmean(fmean(prompt.response_tokens) + prompt.prompt_tokens for prompt in each)
    tokens = profile.prompts * profile.samples * per_prompt
    return EngineCosts(
        k1=profile.k1,
        k2=profile.k2,
        k3=profile.k3,
        k4=profile.k4,
        kv_tokens=profile.kv_tokens,
        gpus=profile.instance_gpus,
        prefill_s_per_token=profile.k3 * DECODE_COMPUTE / PREFILL_COMPUTE,
        prefill_s_per_token2=0.0,
        pull_s=profile.sync_s,
        push_s=profile.sync_s,
        train_gpu_s_per_token=profile.train_s * profile.trainer_gpus / tokens,
        train_fixed_s=0.0,
    )


def profiled_setting(
    profile: RolloutProfile,
    *,
    gpus: int = 0,
    model: Model | None = None,
    tensor_parallel: int = 0,
    seed: int = 0,
) -> Setting:
    """The job of the profile.

    `gpus`: of rollout and training together; 0: as many as the job has. `model`: its latencies are
    used for decoding and training in place of the measured ones, with `tensor_parallel` GPUs of an
    instance (0: as the job has). `seed`: of the lengths.

    Raises:
        InvalidRequestError: the longest response does not fit the KV cache of an instance.
    """
    longest_s = profile.max_tokens * (profile.k2 + profile.k4)
    size = tensor_parallel or profile.instance_gpus
    return Setting(
        gpus=gpus or profile.instances * profile.instance_gpus + profile.trainer_gpus,
        batch_groups=profile.prompts,
        workload=RolloutWorkload(
            groups=tuple(length.response_tokens for length in profile.lengths),
            scale=1.0,
            limit=profile.max_tokens,
            group_size=profile.samples,
            prompt_tokens=round(fmean(length.prompt_tokens for length in profile.lengths)),
            seed=seed,
        ),
        costs=profiled_costs(profile) if model is None else model.costs(size),
        model=model,
        steps=STEPS,
        warmup_steps=WARMUP_STEPS,
        cycle_s=min(CYCLE_S_MAX, max(CYCLE_S_MIN, longest_s / 100)),
    )
