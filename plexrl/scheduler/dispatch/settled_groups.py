"""Groups whose next step is known to decide nothing, so that it is not taken.

Most events that touch a group come while its holder moves or computes: the other members queue
their operations. The report that the move or the run has ended touches the group again.
"""

from typing import Final

from plexrl.scheduler.placement.cluster import Context
from plexrl.scheduler.state.machines.wpg_states import WpgState
from plexrl.scheduler.state.records import Group

_READY: Final = WpgState.READY


def is_settled(context: Context, group: Group) -> bool:
    """Whether nothing can be decided on the group before its holder's move or run has ended.

    What runs on the stored state, a planned move and a prefetch do not wait for the holder. A
    rollout may run several generations at a time, and a forward deployment may be left by its
    source. So only a train deployment that computes and is no filler settles its group.
    """
    name, queues = group.holder, context.cluster.queues
    if name is None or queues.relocating or not group.members:
        return False
    for_stored = context.effects.for_stored
    if for_stored and any(member in for_stored for member in group.members):
        return False
    holder = context.state.deployments[name]
    if holder.wpg.moving is not None or holder.wpg.state is not _READY:
        return True
    if not holder.work.running or holder.spec.kind != "train" or holder.spec.preemptible:
        return False
    return not context.cluster.capacity.inventory.spills(group)
