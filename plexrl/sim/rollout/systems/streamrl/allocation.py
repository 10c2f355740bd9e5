"""Division of the GPUs between generation and training (StreamRL Alg. 1).

The algorithm is the one of `plexrl.rollout.policies.allocation`. Its profile of
generation is a batch that the model has generated before the training, under skewness-aware
dispatch; that of training is the cost model. It looks at whole nodes if there are several.
"""

from plexrl.rollout.policies.allocation import Stage, split
from plexrl.sim.rollout.engine.instance import Instance
from plexrl.sim.rollout.setting import Setting
from plexrl.sim.rollout.systems.streamrl.skewness import SkewnessAware, earlier_batch


def rollout_gpus(setting: Setting, recall: float, unit_gpus: int) -> int:
    """GPUs for generation, a multiple of `unit_gpus`; the others train."""
    tokens = sum(each.prompt_tokens + each.response_tokens for each in earlier_batch(setting))

    def generation_s(units: int) -> float:
        return batch_s(setting, recall, units * unit_gpus // setting.costs.gpus)

    def training_s(units: int) -> float:
        return setting.costs.train_s(tokens, units * unit_gpus)

    found = split(
        Stage(seconds=generation_s, unit_gpus=unit_gpus),
        Stage(seconds=training_s, unit_gpus=unit_gpus),
        setting.gpus,
    )
    return found.instances * unit_gpus


def batch_s(setting: Setting, recall: float, instances: int) -> float:
    """Seconds in which so many instances generate a batch."""
    costs = setting.costs
    shares = SkewnessAware(setting, recall).shares(earlier_batch(setting), instances, costs)
    ends_s = []
    for number, share in enumerate(shares):
        instance = Instance(number, costs)
        instance.route(share, 0.0)
        while (due := instance.next_event_s()) is not None:
            instance.advance(due)
        ends_s.append(instance.at_s)
    return max(ends_s)
