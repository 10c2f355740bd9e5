"""Measures how long free GPUs wait for a job while another one that waits could use them. Pure."""

from typing import Final

from plexrl.scheduler.core.core import SchedulerCore
from plexrl.scheduler.queries.explain_placement import kept_gpus
from plexrl.scheduler.state.messages import events as ev
from plexrl.wire import messages as cmd

_QUIET: Final = (ev.OperationSubmitted, ev.OperationFinished)
"""Most events. They change neither queues nor free GPUs unless workers start or stop."""
_CHANGES: Final = (cmd.LaunchWorkers, cmd.StopWorkers)


class KeptGpus:
    """Looks at the core after each event."""

    def __init__(self, core: SchedulerCore) -> None:
        self._core = core
        self._gpus = 0
        self._since = 0.0
        self._gpu_s = 0.0

    def observe(self, event: ev.Event, commands: list[cmd.Command], now: float) -> None:
        """Note how many GPUs are kept from now on."""
        if isinstance(event, _QUIET) and not any(
            isinstance(command, _CHANGES) for command in commands
        ):
            return
        self._gpu_s += self._gpus * (now - self._since)
        self._gpus, self._since = kept_gpus(self._core.cluster, now), now

    def gpu_seconds(self, until: float) -> float:
        """GPU-seconds up to `until`, which is not before the last event with a job in it."""
        return self._gpu_s + self._gpus * max(0.0, until - self._since)
