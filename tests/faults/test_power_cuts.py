"""Power cuts of machines whose disks lose what was not flushed: no accepted work is lost.

Controllers run on a host of their own, which keeps its power. What the cluster has accepted of them
it must have after each cut: each accepted operation is in the journal, each payload that may still
be read is whole, and the final weights equal those of an undisturbed run. `-k once` is the short
example; `--fault-cuts` says how many cuts the long runs have.
"""

import json
import random
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.faults.accepted import accepted_operations, count_lost
from tests.hosts.cluster import GPU_MEMORY_GIB, HOST_MEMORY_GIB, START_S, HostCluster, SoloCluster
from tests.hosts.host import HostProcess
from tests.hosts.jobs import Jobs
from tests.hosts.loop_disk import why_no_loop_disk
from tests.hosts.network import Network, hosts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(14_400)]

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
            *("--advertise", self.head.name, "--gpus-per-node", "3", "--policy", "pack"),
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


@pytest.fixture(scope="session")
def _loop_disks(_namespaces: None, tmp_path_factory: pytest.TempPathFactory) -> None:
    if reason := why_no_loop_disk(tmp_path_factory.mktemp("loop")):
        pytest.skip(reason)


def network_of(machines: str) -> tuple[tuple[str, ...], dict[str, int]]:
    names, _ = MACHINES[machines]
    return names, {name: DISK_BYTES for name in names if name != CLIENT}


@pytest.fixture(params=list(MACHINES))
def machines(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def cut_power(
    cluster: Cluster, jobs: Jobs, chance: random.Random, cuts: int, scratch: Path
) -> None:
    """Cut the power of a machine at `cuts` moments in which all jobs have moved on. After each cut
    nothing that was accepted is lost."""
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
        if host is cluster.head:
            # Before a service of the host starts again.
            missing, damaged, looked_at = count_lost(
                host.on_disk(cluster.data_dir), accepted, scratch / str(number)
            )
            say(
                f"{len(accepted)} operations accepted, {missing} lost; "
                f"{looked_at} payloads, {damaged} damaged"
            )
            assert not missing, "accepted operations are not in the journal"
            assert not damaged, "payloads of accepted operations are damaged"
        asked_again = jobs.printed().count(ASKED_AGAIN)
        assert not asked_again, "the cluster asked for payloads that it had accepted"


def run(
    machines: str, steps: Mapping[str, int] | None, seed: int, cuts: int, scratch: Path
) -> dict[str, object]:
    """The final weights and the steps of the two jobs, with so many cuts. `steps` are those of a
    run before; None: what the jobs had made after the last cut, and two more."""
    names, sizes = network_of(machines)
    chance = random.Random(f"{seed} {machines}")
    with hosts(*names, disk_bytes=sizes) as network:
        cluster = MACHINES[machines][1](network)
        jobs = Jobs(cluster, dict.fromkeys(JOBS, 0), workers=WORKERS)
        jobs.begin()
        cut_power(cluster, jobs, chance, cuts, scratch)
        wanted = steps or {name: count + 2 for name, count in jobs.steps().items()}
        jobs.end_at(wanted)
        weights = jobs.weights()
        asked_again = jobs.printed().count(ASKED_AGAIN)
        say(f"{cuts} cuts, steps {wanted}, {asked_again} payloads asked again")
        assert not asked_again, "the cluster asked for payloads that it had accepted"
        return {"weights": weights, "steps": wanted}


def assert_survived(machines: str, seed: int, cuts: int, scratch: Path) -> None:
    """The weights after so many cuts are those of an undisturbed run."""
    found = run(machines, None, seed, cuts, scratch)
    steps = found["steps"]
    assert isinstance(steps, dict)
    undisturbed = run(machines, steps, seed, 0, scratch)
    assert found["weights"] == undisturbed["weights"]
    say(f"{machines}: {cuts} cuts, equal weights")


@pytest.mark.usefixtures("_loop_disks")
def test_two_jobs_survive_power_cut_once(machines: str, seed: int, tmp_path: Path) -> None:
    assert_survived(machines, seed, 1, tmp_path)


@pytest.mark.usefixtures("_loop_disks")
def test_two_jobs_survive_many_power_cuts(
    machines: str, seed: int, pytestconfig: pytest.Config, tmp_path: Path
) -> None:
    assert_survived(machines, seed, int(pytestconfig.getoption("--fault-cuts")), tmp_path)
