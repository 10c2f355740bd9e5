"""Does what a schedule of faults says, mends what must be mended after each fault, and records
whether each fault took effect."""

import heapq
import itertools
import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import psutil

from tests.hosts.cluster import HostCluster
from tests.hosts.datagrams import receive, send
from tests.hosts.fault_schedule import (
    CUT,
    CUT_ONE_WAY,
    CUT_S,
    KILL,
    LOSE,
    RANK,
    REBOOT,
    REBOOT_S,
    Fault,
)
from tests.hosts.host import Host, HostProcess

Action = Callable[[], None]
POLL_S = 0.5
VICTIM_S = 90.0
"""How long a kill waits for a process that runs."""
END_S = 30.0
HEALED_S = 10.0


@dataclass(slots=True)
class Outcome:
    """What became of a planned fault."""

    fault: Fault
    at_s: float | None = None
    """When it took effect, in seconds from the start; None: it did not."""
    effect: str = "not injected"
    steps: int = 0
    """Steps that all jobs had made when it was due."""


class Injector:
    """Runs one schedule against a live cluster."""

    def __init__(
        self, cluster: HostCluster, steps: Callable[[], int], say: Callable[[str], None]
    ) -> None:
        """`steps`: how many steps all jobs have made."""
        self._cluster = cluster
        self._steps = steps
        self._say = say
        self._order = itertools.count()
        self._due: list[tuple[float, int, Action]] = []
        self._receivers: dict[str, HostProcess] = {}
        self._started = 0.0
        self.outcomes: list[Outcome] = []
        """One of each fault, in the order of the schedule."""

    def run(self, faults: Sequence[Fault], check: Action) -> None:
        """Returns when every fault has happened and every link is healed. Calls `check` often."""
        self._started = time.monotonic()
        self.outcomes += map(Outcome, faults)
        for outcome in self.outcomes:
            self._at(outcome.fault.at_s, lambda outcome=outcome: self._inject(outcome))  # type: ignore[misc]
        while self._due:
            at_s, _, action = heapq.heappop(self._due)
            while (wait_s := at_s - self._now_s()) > 0:
                check()
                time.sleep(min(wait_s, POLL_S))
            check()
            action()

    def _now_s(self) -> float:
        return time.monotonic() - self._started

    def _at(self, at_s: float, action: Action) -> None:
        heapq.heappush(self._due, (at_s, next(self._order), action))

    def _after(self, seconds: float, action: Action) -> None:
        self._at(self._now_s() + seconds, action)

    def _inject(self, outcome: Outcome) -> None:
        fault = outcome.fault
        network = self._cluster.network
        host = network[fault.host]
        outcome.steps = self._steps()
        self._say(f"{fault}  (steps: {outcome.steps})")
        if fault.what == KILL:
            self._kill(outcome, self._now_s() + VICTIM_S)
        elif fault.what == CUT:
            self._cut(outcome, [(host, network[fault.target]), (network[fault.target], host)])
        elif fault.what == CUT_ONE_WAY:
            self._cut(outcome, [(host, network[fault.target])])
        elif fault.what == REBOOT:
            self._power_off(outcome, host.power_off)
            self._after(REBOOT_S, host.power_on)
        else:
            assert fault.what == LOSE
            self._power_off(outcome, host.lose)
            self._cluster.nodes.remove(host)

    def _done(self, outcome: Outcome, effect: str, at_s: float | None = None) -> None:
        outcome.at_s = self._now_s() if at_s is None else at_s
        outcome.effect = effect
        self._say(f"{outcome.at_s:7.1f} s    {effect}")

    def _kill(self, outcome: Outcome, latest_s: float) -> None:
        """Kill a process as soon as one runs."""
        for host in self._candidates(outcome.fault):
            target = outcome.fault.target
            found = self._cluster.processes_of(host, target) if host.has_power else []
            if not found:
                continue
            victim = random.Random(str(outcome.fault)).choice(found)
            with suppress(psutil.NoSuchProcess):
                victim.kill()
            _, alive = psutil.wait_procs([victim], timeout=END_S)
            assert not alive, f"{victim} survives SIGKILL"
            self._done(outcome, f"process {victim.pid} on {host.name} was killed")
            return
        outcome.effect = f"no process ran in {VICTIM_S:g} s"
        if self._now_s() < latest_s:
            self._after(POLL_S, lambda: self._kill(outcome, latest_s))

    def _candidates(self, fault: Fault) -> list[Host]:
        """The host of a part; for a rank also the other nodes, since a node may have none."""
        host = self._cluster.network[fault.host]
        others = [each for each in self._cluster.nodes if each is not host]
        return [host, *(others if fault.target == RANK else [])]

    def _power_off(self, outcome: Outcome, power_off: Action) -> None:
        host = self._cluster.network[outcome.fault.host]
        running = host.processes()
        power_off()
        _, alive = psutil.wait_procs(running, timeout=END_S)
        assert not alive, f"{alive} survive a power cut"
        self._receivers.pop(host.name, None)
        if running:
            self._done(outcome, f"{len(running)} processes of {host.name} ended")

    def _cut(self, outcome: Outcome, links: Sequence[tuple[Host, Host]]) -> None:
        network = self._cluster.network
        for _, to in links:
            self._receiver(to)
        for sender, receiver in links:
            network.cut_one_way(sender, receiver)
        began_s = self._now_s()
        number = self.outcomes.index(outcome)
        for sender, receiver in links:
            send(sender, receiver, f"lost-{number}")

        def heal() -> None:
            for sender, receiver in links:
                network.heal_one_way(sender, receiver)
            for sender, receiver in links:
                send(sender, receiver, f"healed-{number}")
                self._receiver(receiver).wait_for(f"got healed-{number}", HEALED_S)
                assert f"got lost-{number}" not in self._receiver(receiver).text()
            self._done(outcome, f"no datagram passed for {self._now_s() - began_s:.0f} s", began_s)

        self._after(CUT_S, heal)

    def _receiver(self, host: Host) -> HostProcess:
        """What receives datagrams on a host."""
        found = self._receivers.get(host.name)
        if found is None:
            found = self._receivers[host.name] = receive(host)
        return found
