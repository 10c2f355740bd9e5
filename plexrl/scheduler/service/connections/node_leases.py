"""The leases of nodes whose agents connect over the network. Pure: time is an argument.

A node that is cut off cannot be told to stop its workers. So its agent runs workers under a lease,
which the scheduler extends with each heartbeat, and ends them when the lease has run out. The
scheduler takes a node's work elsewhere only after that:

- The agent counts a lease from the time at which it *sent* the heartbeat; the scheduler from the
  time at which it *received* it, which is later. No clock is compared with another machine's.
- The scheduler waits longer by `DRIFT`, because clocks differ in speed, and by `FENCING_S`, in
  which the agent ends the workers.
- A scheduler extends leases only for `lead_s` seconds after its journal confirmed that it leads.
  Its successor takes over later than the last confirmation, and gives all nodes `lead_s` more.
"""

from plexrl.ids import NodeId

DRIFT = 0.01
"""Maximum relative difference between the speeds of two machines' clocks; real ones differ by less
than 0.0005."""
FENCING_S = 2.0
"""Time in which an agent, or the worker itself, notices that the lease has run out and ends the
worker."""


class NodeLeases:
    """When each node's lease has run out for certain, by this scheduler's clock."""

    def __init__(self, lease_s: float, lead_s: float) -> None:
        """`lease_s`: length of a lease. `lead_s`: how long a scheduler may grant leases after a
        confirmation that it leads."""
        self.lease_s = lease_s
        self._lead_s = lead_s
        self._ends: dict[NodeId, float] = {}
        self._machines: dict[NodeId, str] = {}
        """Where each node's agent ran last."""

    def grant(self, node: NodeId, now: float, lead_confirmed_at: float) -> float:
        """Extend the node's lease. Returns its length in seconds for the agent; 0: not extended,
        because another scheduler may lead by now."""
        if now > lead_confirmed_at + self._lead_s:
            return 0.0
        self._ends[node] = now + _waited(self.lease_s)
        return self.lease_s

    def take_over(self, node: NodeId, machine: str, now: float, lease_s: float) -> None:
        """The former scheduler may have granted the node, on this machine, leases of `lease_s`
        seconds. An empty `machine` is unknown."""
        self._ends[node] = now + self._lead_s + _waited(lease_s)
        if machine:
            self._machines[node] = machine

    def wait_s(self, node: NodeId, machine: str, now: float) -> float:
        """How long an agent on `machine` must wait before it may be the node: until the lease of
        the node's agent on another machine has run out. 0: it is the node from now on."""
        known = self._machines.get(node, machine)
        left_s = 0.0 if known == machine else self.left_s(node, now)
        if left_s == 0.0:
            self._machines[node] = machine
        return left_s

    def left_s(self, node: NodeId, now: float) -> float:
        """Seconds until no worker of the node runs under a lease any more; 0: none does."""
        return max(0.0, self._ends.get(node, now) - now)


def _waited(lease_s: float) -> float:
    return lease_s * (1.0 + DRIFT) + FENCING_S
