"""Puts the profile of a running rollout together from what the cluster has measured."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

from plexrl.client.data.rollout_profile import PromptLengths, RolloutProfile
from plexrl.errors import ConflictError
from plexrl.wire.messages.rollout_views import MeasuredRollout
from plexrl.wire.messages.views import DeploymentStatus, LoggedOperationView

SYNC_KIND = "sync_weights"
STEP_KIND = "optim_step"
STEPS_KEPT = 32
"""Latest training steps of which the mean is taken."""


def make_profile(
    measured: MeasuredRollout,
    deployments: Mapping[str, DeploymentStatus],
    operations: Sequence[LoggedOperationView],
) -> RolloutProfile:
    """The profile of a rollout.

    `measured` is the service's answer, `deployments` the views of the trainer and the instances by
    name, `operations` the finished operations of both, oldest first.

    Raises:
        ConflictError: no batch was trained yet.
    """
    instances = measured["instances"]
    trainer = [operation for operation in operations if _name(operation) == measured["source"]]
    steps = [at for at, each in enumerate(trainer) if each["kind"] == STEP_KIND]
    if not measured["lengths"] or len(steps) < 2 or not measured["kv_tokens"]:
        raise ConflictError(
            "the rollout has no profile before two training steps after its first batch: try again "
            "then"
        )
    # From the end of one step to that of another: whole steps.
    first, last = steps[max(0, len(steps) - 1 - STEPS_KEPT)], steps[-1]
    counted = steps[-1 - min(STEPS_KEPT, len(steps) - 1) :]
    train_s = _seconds(trainer[first + 1 : last + 1]) / (len(counted) - 1)
    syncs = [
        operation
        for operation in operations
        if operation["kind"] == SYNC_KIND and _name(operation) in instances
    ]
    lengths = [
        PromptLengths(prompt_tokens=tokens, response_tokens=tuple(responses))
        for tokens, responses in measured["lengths"]
    ]
    return RolloutProfile(
        prompts=measured["prompts"],
        samples=measured["samples"],
        max_tokens=measured["max_tokens"],
        lengths=tuple(lengths),
        instances=len(instances),
        instance_gpus=int(deployments[instances[0]]["workers"]),
        kv_tokens=measured["kv_tokens"],
        trainer_gpus=int(deployments[measured["source"]]["workers"]),
        measured_steps=measured["measured_steps"],
        train_s=train_s,
        sync_s=fmean(map(_busy_s, syncs)) if syncs else 0.0,
        **measured["decode"],
    )


def _name(operation: LoggedOperationView) -> str:
    return operation["deployment"].rpartition("/")[2]


def _busy_s(operation: LoggedOperationView) -> float:
    return (operation["compute_s"] or 0.0) + operation["transfer_s"]


def _seconds(operations: Iterable[LoggedOperationView]) -> float:
    return sum(operation["compute_s"] or 0.0 for operation in operations)
