"""Cuts the power of machines, and counts what was lost of the work that the cluster had accepted.

The machines' disks are loop devices that forget what was not flushed. Controllers run on a host of
their own, which keeps its power.
"""

import json
import random
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.faults.accepted import accepted_operations, count_lost
from tests.hosts.cluster import GPU_MEMORY_GIB, HOST_MEMORY_GIB, START_S, HostCluster, SoloCluster
from tests.hosts.host import HostProcess
from tests.hosts.jobs import Jobs
from tests.hosts.network import Network, hosts

CLIENT = "client"
JOBS = ("policy", "trainer")
WORKERS = 2
DISK_BYTES = 512 << 20
PAUSE_S = (0.5, 8.0)
"""Least and longest time in which all jobs have made a step, before the next cut."""
LIMIT_S = 600.0
ASKED_AGAIN = "the cluster lost the payload of"
"""What the SDK logs when the cluster asks for a payload again."""
CONFIG = """
[scheduler]
# A version in the memory of a machine goes with its power: all operations are kept to compute it
# again.
rebuild_operations = 100000
"""


class OneMachine(SoloCluster):
    """A cluster on the first host, used from the second; a service manager restarts it."""

    def __init__(self, network: Network) -> None:
        self.head, self.client = network
        self.hosts = [self.head]
        self._supervisor = self._start()
        endpoint = json.loads(self._supervisor.wait_for('"url"', START_S))
        authority = Path(endpoint["ca"])
        self.client.path(authority.parent).mkdir(parents=True)
        self.client.path(authority).write_bytes(self.head.path(authority).read_bytes())
        self.environment = {
            "PLEXRL_URL": str(endpoint["public_url"]),
            "PLEXRL_API_KEY": self.head.path(Path(endpoint["key_file"])).read_text(),
            "PLEXRL_CA_FILE": str(authority),
        }

    def keep_running(self) -> None:
        if self.head.has_power and self._supervisor.poll() is not None:
            self._supervisor = self._start()

    def _start(self) -> HostProcess:
        return self.head.start(
            *("plexrl", "up", "--json", "--tls", "--host", "0.0.0.0", "--nodes", "1"),
            *("--advertise", self.head.name, "--virtual-gpus", "3", "--policy", "pack"),
            *("--gpu-memory", GPU_MEMORY_GIB, "--host-memory", HOST_MEMORY_GIB),
        )


class ThreeHosts(HostCluster):
    """A head and two nodes; the object store is on the host that keeps its power."""

    def __init__(self, network: Network) -> None:
        super().__init__(network, gpus=2, client=CLIENT, config=CONFIG, store=CLIENT)
        self.hosts = [self.head, *self.nodes]


Cluster = OneMachine | ThreeHosts
MACHINES: Mapping[str, tuple[tuple[str, ...], Callable[[Network], Cluster]]] = {
    "one machine": (("solo", CLIENT), OneMachine),
    "three hosts": (("head", "a", "b", CLIENT), ThreeHosts),
}


def say(line: str) -> None:
    """Progress: `pytest -s`, and the report of a failure."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def network_of(machines: str) -> tuple[tuple[str, ...], dict[str, int]]:
    names, _ = MACHINES[machines]
    return names, {name: DISK_BYTES for name in names if name != CLIENT}


@dataclass(slots=True)
class Losses:
    """What cuts of the head's power have cost; other machines hold nothing that was accepted."""

    cuts: int = 0
    accepted: int = 0
    """Operations accepted before a cut of the head."""
    missing: int = 0
    """Of these, operations that the journal on the disk lacks."""
    payloads: int = 0
    """Payloads on the disk that may still be read."""
    damaged: int = 0


def cut_power(
    cluster: Cluster, jobs: Jobs, chance: random.Random, cuts: int, scratch: Path
) -> Losses:
    """Cut the power of a machine at `cuts` moments in which all jobs have moved on. Raises
    `AssertionError` if anything that was accepted is lost."""
    losses = Losses()
    began_at = time.monotonic()
    for number in range(cuts):
        before = jobs.steps()
        deadline = time.monotonic() + LIMIT_S
        while any(count <= before[name] for name, count in jobs.steps().items()):
            jobs.check_alive()
            assert time.monotonic() < deadline, f"no step after cut {number}: {jobs.steps()}"
            time.sleep(0.05)
        moment = time.monotonic() + chance.uniform(*PAUSE_S)
        while time.monotonic() < moment:
            jobs.check_alive()
            time.sleep(0.01)
        host = chance.choice(cluster.hosts)
        say(
            f"{time.monotonic() - began_at:6.1f} s: cut {number + 1} of {cuts}, {host.name}, "
            f"steps {jobs.steps()}"
        )
        accepted = accepted_operations(jobs)
        host.power_off()
        host.power_on()
        losses.cuts += 1
        if host is cluster.head:
            # Before a service of the host starts again.
            missing, damaged, looked_at = count_lost(
                host.on_disk(cluster.data_dir), accepted, scratch / str(number)
            )
            losses.accepted += len(accepted)
            losses.missing += missing
            losses.payloads += looked_at
            losses.damaged += damaged
            say(
                f"{len(accepted)} operations accepted, {missing} lost; "
                f"{looked_at} payloads, {damaged} damaged"
            )
            assert not missing, "accepted operations are not in the journal"
            assert not damaged, "payloads of accepted operations are damaged"
        asked_again = jobs.printed().count(ASKED_AGAIN)
        assert not asked_again, "the cluster asked for payloads that it had accepted"
    return losses


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """How the two jobs ended."""

    weights: dict[str, str]
    """Digests."""
    steps: Mapping[str, int]
    losses: Losses


def run(machines: str, steps: Mapping[str, int] | None, seed: int, cuts: int, scratch: Path) -> Run:
    """Run both jobs with so many cuts. `steps` are those of a run before; None: what the jobs had
    made after the last cut, and two more."""
    names, sizes = network_of(machines)
    chance = random.Random(f"{seed} {machines}")
    with hosts(*names, disk_bytes=sizes) as network:
        cluster = MACHINES[machines][1](network)
        jobs = Jobs(cluster, dict.fromkeys(JOBS, 0), workers=WORKERS)
        jobs.begin()
        losses = cut_power(cluster, jobs, chance, cuts, scratch)
        wanted = steps or {name: count + 2 for name, count in jobs.steps().items()}
        jobs.end_at(wanted)
        weights = jobs.weights()
        asked_again = jobs.printed().count(ASKED_AGAIN)
        say(f"{cuts} cuts, steps {wanted}, {asked_again} payloads asked again")
        assert not asked_again, "the cluster asked for payloads that it had accepted"
        return Run(weights=weights, steps=wanted, losses=losses)


def assert_survived(machines: str, seed: int, cuts: int, scratch: Path) -> Losses:
    """Run both jobs with so many cuts, and undisturbed: the weights are equal."""
    cut = run(machines, None, seed, cuts, scratch)
    undisturbed = run(machines, cut.steps, seed, 0, scratch)
    assert cut.weights == undisturbed.weights
    say(f"{machines}: {cuts} cuts, equal weights")
    return cut.losses
