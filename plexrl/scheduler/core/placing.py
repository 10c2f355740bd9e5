"""Places the deployments that admission chooses."""

from plexrl.scheduler.admission.admission import admit
from plexrl.scheduler.admission.awaited_profiles import await_profile
from plexrl.scheduler.admission.queues.fillers import place_fillers
from plexrl.scheduler.jobs.lifecycle import all_placed, has_all_gpus, launch
from plexrl.scheduler.placement.cluster import Context
from plexrl.scheduler.recovery.relocation import drain, settle
from plexrl.scheduler.state.machines.wpg_states import WpgState


def place_waiting(context: Context, now: float) -> None:
    """Place all deployments that admission chooses, and start their workers."""
    state, effects = context.state, context.effects
    for deployment in (
        *admit(context, now),
        *place_fillers(context.cluster, now),
    ):
        effects.touch_all(deployment.placement.groups)
        job = state.job(deployment.job)
        if deployment.wpg.processes.incarnation:
            # It had GPUs before, and lost them.
            settle(context.step(now), deployment)
        else:
            deployment.wpg.launch_first()
        if deployment.wpg.state != WpgState.MIGRATING:
            launch(context.step(now), deployment)
        await_profile(context, deployment)
        if has_all_gpus(state, job):
            all_placed(context, job)

    for node in sorted(context.cluster.capacity.inventory.draining):
        for group in drain(context.cluster, node, now):
            effects.touch(group)
