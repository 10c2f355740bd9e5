"""What becomes of the WPGs on a node that is to be empty."""

from plexrl.ids import NodeId
from plexrl.scheduler.context import Context
from plexrl.scheduler.relocation import drain


def look_at_node(context: Context, name: NodeId, now: float) -> None:
    """Move off the node whatever should not stay there, as far as it can go now."""
    node = context.state.nodes[name]
    if node.is_draining:
        drain(context, name, now)
