"""Six jobs on three nodes while parts die, links fail and hosts go: nothing is lost or doubled."""

import sys
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path

import pytest

from plexrl.process.startup import load_config
from plexrl.scheduler.context.config import SchedulerConfig
from tests.hosts.cluster import HostCluster, SoloCluster
from tests.hosts.evidence import (
    Edge,
    History,
    check_one_holder,
    check_operations,
    read_edges,
    read_history,
)
from tests.hosts.fault_schedule import CUT, HEAD_PARTS, KILL, LOSE, NODE_PARTS, schedule
from tests.hosts.injector import Injector
from tests.hosts.jobs import Jobs
from tests.hosts.network import Network, hosts

NODES = ("a", "b", "c")
GPUS = 2
"""Fewer than the ranks of a trainer, so that each trainer spans two nodes. Two nodes are enough for
one shared group of trainers and the rollout."""
WORKERS = 3
JOBS = ("policy", "trainer", "trainer-2", "trainer-3", "offload", "offload-2")


@pytest.fixture(scope="module")
def duration_s(pytestconfig: pytest.Config) -> float:
    """Time in which faults happen."""
    return float(pytestconfig.getoption("--fault-seconds"))


@pytest.fixture(scope="module")
def seed(pytestconfig: pytest.Config) -> int:
    """What moments, order and victims of the faults follow from."""
    return int(pytestconfig.getoption("--fault-seed"))


def say(line: str) -> None:
    """Progress for whoever watches: `pytest -s`, and the report of a failure."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


@pytest.mark.slow
@pytest.mark.timeout(10_800)
@pytest.mark.usefixtures("_namespaces")
def test_six_jobs_survive_faults_of_parts_links_and_hosts(
    tmp_path: Path, seed: int, duration_s: float
) -> None:
    faults = schedule(seed, duration_s, "head", NODES)
    say(f"\nseed {seed}: {len(faults)} faults in {duration_s:g} s")
    with hosts("head", *NODES) as network:
        cluster = HostCluster(network, gpus=GPUS)
        jobs = Jobs(cluster, dict.fromkeys(JOBS, 0), workers=WORKERS)
        jobs.begin()
        Injector(cluster, say).run(faults, jobs.check_alive)
        steps = {name: count + 3 for name, count in jobs.steps().items()}
        say(f"the last fault is over; steps: {steps}")
        jobs.end_at(steps)
        found = jobs.weights()
        # Before the end of the cluster, which compacts the journal.
        history = history_of(cluster, tmp_path)
        cluster.end()
        edges = edges_of(network)
    say(f"{len(history.submitted)} operations, {len(edges) // 2} runs on a rank")
    check_operations(history)
    check_one_holder(edges, history.groups)
    assert found == undisturbed(steps)


def history_of(cluster: HostCluster, scratch: Path) -> History:
    """What the head's journal says."""
    folders = cluster.head.path("/tmp").glob("plexrl-*/scheduler.json")
    config = load_config(next(folders), SchedulerConfig)
    journal = cluster.head.on_disk(cluster.data_dir / "journal.sqlite")
    return read_history(journal, config, scratch)


def edges_of(network: Network) -> list[Edge]:
    """What the workers of all nodes logged, those of a lost node included."""
    pattern = f"{str(HostCluster.node_data_dir).lstrip('/')}/logs/*/*/*.log"
    return read_edges(path for host in network for path in host.on_disk("/").glob(pattern))


def undisturbed(steps: Mapping[str, int]) -> dict[str, str]:
    """The weights of the same jobs on one machine, where nothing fails."""
    with hosts("solo") as network:
        (host,) = network
        cluster = SoloCluster(host, gpus=WORKERS + 1)
        jobs = Jobs(cluster, steps, workers=WORKERS)
        jobs.begin()
        found = jobs.weights()
        cluster.end()
    return found


def test_a_seed_gives_one_schedule() -> None:
    assert schedule(1, 240.0, "head", NODES) == schedule(1, 240.0, "head", NODES)
    assert schedule(1, 240.0, "head", NODES) != schedule(2, 240.0, "head", NODES)


def test_a_schedule_has_every_part_and_every_link_until_a_node_is_lost() -> None:
    faults = schedule(3, 1800.0, "head", NODES)
    killed = {fault.target for fault in faults if fault.what == KILL}
    assert killed == {*HEAD_PARTS, *NODE_PARTS}
    cut = {frozenset((fault.host, fault.target)) for fault in faults if fault.what == CUT}
    assert cut == {frozenset(pair) for pair in combinations(("head", *NODES), 2)}
    (loss,) = [fault for fault in faults if fault.what == LOSE]
    later = faults[faults.index(loss) + 1 :]
    assert later
    assert all(loss.host not in (fault.host, fault.target) for fault in later)
