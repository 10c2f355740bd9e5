"""What controllers and operators see of a rollout."""

from typing import Any

import msgspec

from plexrl.rollout.batching.rounds import RoundKind
from plexrl.rollout.service.instances.membership import Member
from plexrl.rollout.service.live_rollout import LiveRollout, PullTimes
from plexrl.rollout.staleness.buffers import BufferState

Plain = dict[str, Any]


def status(rollout: LiveRollout) -> Plain:
    """What controllers and operators see of a rollout; see docs/sdk.md."""
    core, progress, order = rollout.core, rollout.progress, rollout.order
    buffers, settings, prompts = core.manager.buffers, core.settings.staleness, core.rounds
    started = settings.group_size if prompts.kind is RoundKind.LONG else settings.samples
    failure = rollout.failure
    latest = progress.batch
    return {
        "job": order.job,
        "name": order.name,
        "source": order.source,
        "staleness": order.staleness,
        "eta_prompts": order.eta_prompts,
        "eta_responses": order.eta_responses,
        "plans_parallelism": order.plans_parallelism,
        "scale_down": order.scale_down,
        "scale_downs": progress.scale_downs,
        "instances_min": order.instances_min,
        "instances_max": order.instances_max,
        "instances_wanted": len(progress.names(order)),
        "instances_added": progress.added,
        "instances_removed": progress.removed,
        "instances_reason": progress.change_reason,
        "adaptive_tp": order.adaptive_tp is not None,
        "tp_switches": progress.tp_switches,
        "length_aware": order.length_aware,
        "ranked_prompts": 0 if rollout.ranker is None else rollout.ranker.prompts,
        "round": prompts.kind,
        "queued_prompts": len(prompts.queue),
        "prompts": order.prompts,
        "samples": order.samples,
        "state": "failed" if failure else "running" if rollout.is_joined else "joining",
        "failure": None if failure is None else failure.to_wire(),
        "joined": rollout.is_joined,
        "groups_wanted": core.groups_wanted,
        "next_group": progress.next_group,
        "next_batch": buffers.next_version,
        "latest_batch": None
        if latest is None
        else {"version": latest.version, "trainer_step": rollout.steps.get(latest.version)},
        "newest_version": core.newest_version,
        "waiting": core.trajectories.waiting,
        "unrewarded": len(progress.unrewarded),
        "dropped": progress.dropped_groups,
        "dropped_reason": progress.dropped_reason,
        "instances": {each.name: _instance(rollout, each) for each in rollout.members},
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
        "batches_ready": sum(
            buffers.state(version) is BufferState.READY for version, _ in buffers.entries()
        ),
        "in_flight": len(core.trajectories.groups) * started,
        "in_flight_max": settings.groups_max * settings.samples,
        "batches": [
            {
                **msgspec.to_builtins(each, str_keys=True),
                "trainer_step": rollout.steps.get(each.version),
            }
            for each in progress.batches
        ],
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
        "journal": {"bytes": rollout.store.bytes, "events": rollout.store.tail_events},
    }


def measured(rollout: LiveRollout) -> Plain:
    """What a profile needs besides the times of operations; see `RolloutProfile`."""
    order, model = rollout.order, rollout.core.cost_model
    budgets = [int(each.kv_budget) for each in rollout.instances.work.values()]
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


def _instance(rollout: LiveRollout, member: Member) -> Plain:
    times = rollout.pulls.get(member.name, PullTimes())
    return {
        **_load(rollout, member),
        "pulls": times.count,
        "pause_s": times.pause_s,
        "transfer_s": times.transfer_s,
    }


def _load(rollout: LiveRollout, member: Member) -> Plain:
    work = None if member.instance is None else rollout.instances.work.get(member.instance)
    if work is None:
        is_lost = member.absence is not None
        reason = member.absence.reason if member.absence is not None else ""
        return {
            "state": "lost" if is_lost else "joining",
            "reason": reason,
            **dict.fromkeys(("trajectories", "running", "waiting", "completed"), 0),
            **dict.fromkeys(("version", "kv_tokens", "kv_budget", "tp"), None),
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
