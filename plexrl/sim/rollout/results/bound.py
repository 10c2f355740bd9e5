"""A throughput that no schedule exceeds if rollout and training have GPUs of their own. Pure.

A decode step with `kv` cached tokens adds `kv` to C, the sum of the contexts of all generated
tokens, and `kv` is at most the KV cache. So T tokens take at least C / kv_tokens steps, which are
k1·C + k3·T + k4·C / kv_tokens seconds of an instance, and one prefill of each prompt. A schedule
that reaches the bound keeps every cache full, computes nothing twice, and no side waits.
"""

from collections.abc import Sequence

from plexrl.sim.rollout.results.outcome import RolloutOutcome
from plexrl.sim.rollout.setting import ON_POLICY, Setting
from plexrl.sim.rollout.workload import Prompts


def throughput_bound(setting: Setting, rollout_gpus: int = 0) -> float:
    """Tokens of prompts and responses per second, for the prompts of the setting's steps.

    `rollout_gpus`: GPUs that roll out; 0: the split with the highest bound.
    """
    costs, prompt = setting.costs, setting.workload.prompt_tokens
    prompts = Prompts(setting.workload)
    count = setting.steps * setting.batch_groups
    lengths = [each.response_tokens for at in range(count) for each in prompts.group(at)]
    generated = sum(lengths)
    contexts = sum(length * prompt + length * (length - 1) // 2 for length in lengths)
    instance_s = (
        costs.k1 * contexts
        + costs.k3 * generated
        + costs.k4 * contexts / costs.kv_tokens
        + costs.prefill_s(prompt) * len(lengths)
    )
    tokens = generated + prompt * len(lengths)

    def least_s(gpus: int) -> float:
        rollout_s = instance_s / (gpus // costs.gpus)
        train_s = costs.train_gpu_s_per_token * tokens / (setting.gpus - gpus)
        return max(rollout_s, train_s + setting.steps * costs.train_fixed_s)

    splits = [rollout_gpus] if rollout_gpus else range(costs.gpus, setting.gpus, costs.gpus)
    return tokens / min(least_s(gpus) for gpus in splits)


def bounds(settings: Sequence[Setting], outcomes: Sequence[RolloutOutcome]) -> list[float]:
    """The bound of each setting; none if no system divides its GPUs."""
    if all(outcome.system.name in ON_POLICY for outcome in outcomes):
        return []
    return [throughput_bound(setting) for setting in settings]
