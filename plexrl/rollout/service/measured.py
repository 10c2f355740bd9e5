"""What a rollout has measured of its own work, for a profile."""

from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from plexrl.rollout.service.live_rollout import LiveRollout

Plain = dict[str, Any]


def measured(rollout: "LiveRollout") -> Plain:
    """What a profile needs besides the times of operations; see `RolloutProfile`."""
    order, model = rollout.order, rollout.core.cost_model
    budgets = [int(each.kv_budget) for each in rollout.instances.work.values()]
    return {
        "source": order.source,
        "instances": list(order.instances),
        "prompts": order.prompts,
        "samples": order.samples,
        "max_tokens": order.sampling.max_tokens,
        "lengths": msgspec.to_builtins(rollout.progress.lengths_by_prompt),
        "kv_tokens": min(budgets, default=0),
        "decode": {"k1": model.k1 * model.k5, "k2": model.k2, "k3": model.k3, "k4": model.k4},
        "measured_steps": rollout.core.measured_steps,
    }
