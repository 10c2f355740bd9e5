"""Does what a schedule of faults says, and mends what must be mended after each fault."""

import heapq
import itertools
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import psutil

from tests.hosts.cluster import HostCluster
from tests.hosts.fault_schedule import (
    CUT,
    CUT_ONE_WAY,
    CUT_S,
    KILL,
    LOSE,
    REBOOT,
    REBOOT_S,
    Fault,
)
from tests.hosts.host import Host

Action = Callable[[], None]
SERVICE = "multiprocessing.forkserver"


class Injector:
    """Runs one schedule against a live cluster."""

    def __init__(self, cluster: HostCluster, say: Callable[[str], None]) -> None:
        self._cluster = cluster
        self._say = say
        self._order = itertools.count()
        self._due: list[tuple[float, int, Action]] = []
        self._cuts: dict[tuple[str, str], int] = {}
        """Cuts of each link that last, by direction: two may overlap."""

    def run(self, faults: Sequence[Fault], check: Action) -> None:
        """Returns when every fault has happened and every link is healed. Calls `check` often."""
        started = time.monotonic()
        for fault in faults:
            self._at(started + fault.at_s, lambda fault=fault: self._inject(fault))  # type: ignore[misc]
        while self._due:
            at, _, action = heapq.heappop(self._due)
            while (wait_s := at - time.monotonic()) > 0:
                check()
                time.sleep(min(wait_s, 0.5))
            action()

    def _at(self, at: float, action: Action) -> None:
        heapq.heappush(self._due, (at, next(self._order), action))

    def _after(self, seconds: float, action: Action) -> None:
        self._at(time.monotonic() + seconds, action)

    def _inject(self, fault: Fault) -> None:
        host = self._cluster.network[fault.host]
        other = fault.target
        self._say(str(fault))
        if not host.has_power:
            self._say("           it is off")
        elif fault.what == KILL:
            self._kill(host, fault)
        elif fault.what in (CUT, CUT_ONE_WAY):
            both = fault.what == CUT
            links = [(host.name, other), (other, host.name)] if both else [(host.name, other)]
            self._cut(links)
        elif fault.what == REBOOT:
            host.power_off()
            self._after(REBOOT_S, lambda: self._power_on(host))
        else:
            assert fault.what == LOSE
            host.lose()
            self._cluster.nodes.remove(host)

    def _kill(self, host: Host, fault: Fault) -> None:
        if fault.target == "supervisor":
            process = self._cluster.supervisor(host)
            with suppress(ProcessLookupError, AssertionError):
                os.kill(process.pid, signal.SIGKILL)
            return
        found = ranks(host) if fault.target == "rank" else host.processes(f"-m {fault.target} ")
        if not found:
            self._say("           it is not running")
            return
        victim = random.Random(str(fault)).choice(sorted(found, key=lambda each: each.pid))
        with suppress(psutil.NoSuchProcess):
            victim.kill()

    def _power_on(self, host: Host) -> None:
        if host in self._cluster.nodes:
            host.power_on()

    def _cut(self, links: Sequence[tuple[str, str]]) -> None:
        network = self._cluster.network
        for a, b in links:
            self._cuts[a, b] = self._cuts.get((a, b), 0) + 1
            network.cut_one_way(network[a], network[b])

        def heal() -> None:
            for a, b in links:
                self._cuts[a, b] -= 1
                if not self._cuts[a, b]:
                    network.heal_one_way(network[a], network[b])

        self._after(CUT_S, heal)


def ranks(host: Host) -> list[psutil.Process]:
    """The worker processes of a host: what its agents' fork servers have forked."""
    servers = host.processes(SERVICE)
    found = []
    for server in servers:
        with suppress(psutil.NoSuchProcess):
            found += [each for each in server.children() if SERVICE in " ".join(each.cmdline())]
    return found
