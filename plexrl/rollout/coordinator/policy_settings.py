"""Turns a policy of a rollout into the coordinator's settings, live and simulated. Pure."""

from plexrl.client.data.rollout_policy import PolicyFields
from plexrl.rollout.coordinator.settings import CoordinatorSettings
from plexrl.rollout.instances.cost_model import CostModel
from plexrl.rollout.policies.adaptive_tp.settings import AdaptiveTpSettings
from plexrl.rollout.policies.scale_down import ScaleDownSettings
from plexrl.rollout.policies.tail_batching.rounds import extra_count
from plexrl.rollout.staleness.manager import StalenessSettings


def coordinator_settings(
    policy: PolicyFields,
    *,
    batch_groups: int,
    group_size: int,
    response_tokens_max: int,
    cost_model: CostModel,
    group_ids: int = 0,
    first_version: int = 0,
    dynamic_sampling: bool = False,
) -> CoordinatorSettings:
    """The settings of a coordinator with this policy; the other arguments are as in
    `StalenessSettings` and `CoordinatorSettings`.

    Raises:
        InvalidRequestError: the policy does not fit the sizes of batch and group.
    """
    profile = policy.adaptive_tp
    return CoordinatorSettings(
        staleness=StalenessSettings(
            staleness=policy.staleness,
            batch_groups=batch_groups,
            group_size=group_size,
            extra_groups=extra_count(policy.over_launch_prompts, batch_groups),
            extra_samples=extra_count(policy.over_launch_responses, group_size),
            group_ids=group_ids,
            first_version=first_version,
        ),
        cost_model=cost_model,
        routing="length-aware" if policy.length_aware else "throughput",
        scale_down=ScaleDownSettings(response_tokens_max=response_tokens_max)
        if policy.scale_down
        else None,
        adaptive_tp=None
        if profile is None
        else AdaptiveTpSettings(profile=profile, response_tokens_max=response_tokens_max),
        fixed_over_launch=policy.fixed_over_launch,
        dynamic_sampling=dynamic_sampling,
    )
