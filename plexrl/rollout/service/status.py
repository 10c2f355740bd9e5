"""Views of a rollout for controllers and operators."""

import asyncio

import msgspec

from plexrl.rollout.service.instances.membership import RolloutMember
from plexrl.rollout.service.live_rollout import LiveRollout, PullTimes
from plexrl.rollout.staleness.buffers import BufferState
from plexrl.rollout.trajectories.record import group_of
from plexrl.wire.messages.rollout_views import (
    InstanceLoadView,
    InstanceView,
    MeasuredRollout,
    RolloutBatchesView,
    RolloutInstancesView,
    RolloutOrderView,
    RolloutStatus,
    TrajectoriesView,
    UnrewardedView,
)


def status(rollout: LiveRollout) -> RolloutStatus:
    """The status of a rollout for controllers and operators; see docs/async_rollouts.md."""
    return {
        **_order(rollout),
        **_instances(rollout),
        **_batches(rollout),
        **_trajectories(rollout),
        "journal": {"bytes": rollout.store.bytes, "events": rollout.store.tail_events},
    }


def _order(rollout: LiveRollout) -> RolloutOrderView:
    """The order of the controller, and whether it is served."""
    order, failure = rollout.order, rollout.failure
    return {
        "job": order.job,
        "name": order.name,
        "source": order.source,
        "staleness": order.staleness,
        "over_launch_prompts": order.over_launch_prompts,
        "over_launch_responses": order.over_launch_responses,
        "fixed_over_launch": order.fixed_over_launch,
        "plans_parallelism": order.plans_parallelism,
        "scale_down": order.scale_down,
        "instances_min": order.instances_min,
        "instances_max": order.instances_max,
        "adaptive_tp": order.adaptive_tp is not None,
        "length_aware": order.length_aware,
        "prompts": order.prompts,
        "samples": order.samples,
        "state": "failed" if failure else "running" if rollout.is_joined else "joining",
        "failure": None if failure is None else failure.to_wire(),
        "joined": rollout.is_joined,
        "waits_for": _waits_for(rollout),
    }


def _instances(rollout: LiveRollout) -> RolloutInstancesView:
    """The instances, and how their number and parallelism changed."""
    progress = rollout.progress
    return {
        "scale_downs": progress.scale_downs,
        "instances_wanted": len(progress.names(rollout.order)),
        "instances_added": progress.added,
        "instances_removed": progress.removed,
        "instances_reason": progress.change_reason,
        "tp_switches": progress.tp_switches,
        "instances": {member.name: _instance(rollout, member) for member in rollout.members},
    }


def _batches(rollout: LiveRollout) -> RolloutBatchesView:
    """The batches that are filled, ready and trained."""
    core, progress = rollout.core, rollout.progress
    buffers, latest = core.manager.buffers, progress.batch
    return {
        "groups_wanted": core.groups_wanted,
        "next_group": progress.next_group,
        "next_batch": buffers.next_version,
        "latest_batch": None
        if latest is None
        else {"version": latest.version, "trainer_step": rollout.steps.get(latest.version)},
        "newest_version": core.newest_version,
        "buffers": [
            {
                "version": version,
                "state": buffers.state(version).value,
                "reserved": len(each.reserved),
                "occupied": len(each.occupied),
                "size": buffers.size,
            }
            for version, each in buffers.entries()
        ],
        "batches_ready": _batches_ready(rollout),
        "batches": [
            {
                "version": batch.version,
                "samples": batch.samples,
                "tokens": batch.tokens,
                "staleness": {str(age): count for age, count in batch.staleness.items()},
                "round": batch.round,
                "trainer_step": rollout.steps.get(batch.version),
            }
            for batch in progress.batches
        ],
    }


def _trajectories(rollout: LiveRollout) -> TrajectoriesView:
    """Prompts and samples: what waits, what is generated, and what became of them."""
    core, progress = rollout.core, rollout.progress
    settings, prompts = core.settings.staleness, core.rounds
    chosen = prompts.held.chosen
    return {
        "ranked_prompts": 0 if rollout.ranker is None else rollout.ranker.prompts,
        "round": prompts.kind,
        "round_extra_prompts": prompts.extra.groups if prompts.kind else 0,
        "round_extra_samples": prompts.extra.samples if prompts.kind else 0,
        "over_launch_gain": None if chosen is None else chosen.gain,
        "queued_prompts": len(prompts.queue),
        "waiting": core.trajectories.waiting,
        "unrewarded": len(progress.unrewarded),
        "oldest_unrewarded": _oldest_unrewarded(rollout),
        "dropped": progress.dropped_groups,
        "dropped_reason": progress.dropped_reason,
        "in_flight": len(core.trajectories.groups) * prompts.samples,
        "in_flight_max": settings.groups_max * settings.samples,
        "staleness_seen": {str(age): n for age, n in sorted(progress.staleness.items())},
        "totals": {
            "generated": msgspec.to_builtins(progress.generated),
            "trained": msgspec.to_builtins(progress.trained),
            "dropped": msgspec.to_builtins(progress.dropped),
            "unfinished": progress.unfinished,
            "aborted": msgspec.to_builtins(progress.aborted),
            "aborted_prompts": progress.aborted_groups,
            "failed_generations": progress.failed_generations,
        },
        "tokens_generated": progress.generated.tokens,
        "tokens_per_s": rollout.tokens_per_s(),
    }


def _waits_for(rollout: LiveRollout) -> str:
    """What it waits for, as a sentence; empty: it generates, or has failed."""
    if rollout.failure is not None:
        return ""
    if not rollout.is_joined:
        return "its instances wait for the trainer's weights"
    waiting, oldest = len(rollout.progress.unrewarded), _oldest_unrewarded(rollout)
    if oldest is not None:
        samples = "1 sample waits" if waiting == 1 else f"{waiting} samples wait"
        return (
            f"{samples} for a reward of the controller, the oldest, of prompt {oldest['prompt']}, "
            f"for {oldest['waiting_s']:.0f} s"
        )
    core = rollout.core
    if core.groups_wanted and not core.trajectories.groups:
        return "it waits for prompts of the controller"
    if not core.trajectories.groups and _batches_ready(rollout):
        return "it waits until the controller takes the batches that are ready"
    return ""


def _batches_ready(rollout: LiveRollout) -> int:
    buffers = rollout.core.manager.buffers
    return sum(buffers.state(version) is BufferState.READY for version, _ in buffers.entries())


def _oldest_unrewarded(rollout: LiveRollout) -> UnrewardedView | None:
    progress, now = rollout.progress, asyncio.get_running_loop().time()
    found = rollout.reward_waits.oldest(progress.unrewarded, now)
    if found is None:
        return None
    return {"prompt": group_of(found[0], progress.group_size), "waiting_s": found[1]}


def measured(rollout: LiveRollout) -> MeasuredRollout:
    """The figures of a profile besides the times of operations; see `RolloutProfile`."""
    order, model = rollout.order, rollout.core.cost_model
    budgets = [int(work.kv_budget) for work in rollout.instances.work.values()]
    return {
        "source": order.source,
        "instances": list(rollout.progress.names(order)),
        "prompts": order.prompts,
        "samples": order.samples,
        "max_tokens": order.sampling.max_tokens,
        "lengths": msgspec.to_builtins(rollout.progress.lengths_by_prompt),
        "kv_tokens": min(budgets, default=0),
        "decode": {"k1": model.k1 * model.k5, "k2": model.k2, "k3": model.k3, "k4": model.k4},
        "measured_steps": rollout.core.measured_steps,
    }


def _instance(rollout: LiveRollout, member: RolloutMember) -> InstanceView:
    times = rollout.pulls.get(member.name, PullTimes())
    return {
        **_load(rollout, member),
        "pulls": times.count,
        "pause_s": times.pause_s,
        "transfer_s": times.transfer_s,
    }


def _load(rollout: LiveRollout, member: RolloutMember) -> InstanceLoadView:
    work = None if member.instance is None else rollout.instances.work.get(member.instance)
    if work is None:
        is_lost = member.absence is not None
        reason = member.absence.reason if member.absence is not None else ""
        return {
            "state": "lost" if is_lost else "joining",
            "reason": reason,
            "trajectories": 0,
            "running": 0,
            "waiting": 0,
            "completed": 0,
            "version": None,
            "kv_tokens": None,
            "kv_budget": None,
            "tp": None,
        }
    assert member.instance is not None
    shown = rollout.loads.get(member.instance)
    state = "freed" if member.instance in rollout.core.freed.held.freed else "joined"
    return {
        "state": "draining" if member.name in rollout.progress.ending else state,
        "reason": "",
        "version": work.version,
        "trajectories": len(work.held),
        "running": 0 if shown is None else len(shown.running),
        "waiting": 0 if shown is None else len(shown.waiting),
        "kv_tokens": 0 if shown is None else int(shown.kv_cache),
        "kv_budget": int(work.kv_budget),
        "tp": None if shown is None or not shown.tp else shown.tp,
        "completed": work.completed,
    }
