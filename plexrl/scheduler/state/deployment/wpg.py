"""A WPG's state and residency: the only module that writes either.

What a WPG is doing follows from both tables (`machines.wpg_states`, `machines.residency_states`).
Only a READY WPG moves its training state, so every transition that ends its processes makes its
residency NONE too.
"""

from plexrl.ids import NodeId
from plexrl.scheduler.state.machines.residency_states import ResidencyTrigger, next_residency
from plexrl.scheduler.state.machines.wpg_states import WpgTrigger, next_state
from plexrl.scheduler.state.records import Deployment


def launch_first(deployment: Deployment) -> None:
    """The WPG has its first GPUs, and its processes are started on them."""
    _change(deployment, WpgTrigger.PLACED)


def resume(deployment: Deployment) -> None:
    """The WPG has other GPUs or other nodes' copies, and its processes are started."""
    _change(deployment, WpgTrigger.RESUMED)


def await_copies(deployment: Deployment, nodes: list[NodeId]) -> None:
    """The WPG has other GPUs; its processes start once `nodes` have its durable version."""
    _change(deployment, WpgTrigger.MIGRATED)
    deployment.stored.await_copies(nodes)


def connect(deployment: Deployment, now: float) -> None:
    """All its processes are ready."""
    _change(deployment, WpgTrigger.CONNECTED)
    deployment.processes.ready_at = now


def interrupt(deployment: Deployment) -> None:
    """Its processes are given up; others are to be started."""
    _change(deployment, WpgTrigger.INTERRUPTED)
    _change_residency(deployment, ResidencyTrigger.PROCESSES_GONE)


def lose_processes(deployment: Deployment) -> None:
    """The processes on the GPUs that it leaves are stopped; the next state is decided later."""
    deployment.processes.lose_all()
    _change_residency(deployment, ResidencyTrigger.PROCESSES_GONE)


def displace(deployment: Deployment) -> None:
    """The WPG has left its group, and waits for other GPUs."""
    _change(deployment, WpgTrigger.DISPLACED)
    deployment.ranks = ()
    deployment.nodes = ()
    deployment.placement = None
    deployment.stored.stop_awaiting()
    deployment.processes.cancel_launch()
    deployment.processes.lose_all()


def end(deployment: Deployment) -> None:
    """It was ended, or its job was."""
    _change(deployment, WpgTrigger.ENDED)


def begin_load(deployment: Deployment) -> None:
    """Its state is on its way to the GPUs."""
    _change_residency(deployment, ResidencyTrigger.LOAD_BEGAN)


def end_load(deployment: Deployment) -> None:
    """Its state is on the GPUs."""
    _change_residency(deployment, ResidencyTrigger.LOADED)


def refuse_load(deployment: Deployment) -> None:
    """A load ended and changed nothing."""
    trigger = ResidencyTrigger.FIRST_LOAD_REFUSED
    if deployment.replay.durable_seq:
        trigger = ResidencyTrigger.LOAD_REFUSED
    _change_residency(deployment, trigger)


def begin_offload(deployment: Deployment) -> None:
    """Its state is on its way off the GPUs."""
    _change_residency(deployment, ResidencyTrigger.OFFLOAD_BEGAN)


def end_offload(deployment: Deployment) -> None:
    """Its state is off the GPUs."""
    _change_residency(deployment, ResidencyTrigger.OFFLOADED)


def refuse_offload(deployment: Deployment) -> None:
    """An offload ended and changed nothing."""
    _change_residency(deployment, ResidencyTrigger.OFFLOAD_REFUSED)


def _change(deployment: Deployment, trigger: WpgTrigger) -> None:
    deployment.state = next_state(deployment.state, trigger)


def _change_residency(deployment: Deployment, trigger: ResidencyTrigger) -> None:
    deployment.residency = next_residency(deployment.residency, trigger)
