"""Six jobs on three nodes while parts die, links fail and hosts go: nothing is lost or doubled."""

import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path

import pytest

from plexrl.process.children.startup import load_config
from plexrl.scheduler.rules.config import SchedulerConfig
from tests.hosts.cluster import HostCluster, SoloCluster
from tests.hosts.evidence import (
    Edge,
    History,
    JournalCopy,
    check_one_holder,
    check_operations,
    read_edges,
    read_history,
)
from tests.hosts.fault_report import FaultReport, made
from tests.hosts.fault_schedule import (
    CUT,
    CUT_S,
    KILL,
    LOSE,
    PLAIN,
    RANK,
    REBOOT,
    SUPERVISOR,
    Parts,
    schedule,
)
from tests.hosts.injector import Injector
from tests.hosts.jobs import Jobs
from tests.hosts.network import Network, hosts
from tests.hosts.ray_cluster import RAYLET, RayHosts

HEAD = "head"
NODES = ("a", "b", "c")
CLIENT = "client"
"""Host of the controllers, which has no fault."""
GPUS = 2
"""Fewer than the ranks of a trainer, so that each trainer spans two nodes. Two nodes are enough for
one shared group of trainers and the rollout."""
WORKERS = 3
CONFIG = """
[scheduler]
# A lost host's work goes elsewhere before the next fault.
node_replace_s = 25.0
# The only copy of a model's state may be lost with a host: all operations are kept to compute it
# again.
rebuild_operations = 100000
rebuild_payload_bytes_max = 8589934592
"""
JOBS = ("policy", "trainer", "trainer-2", "trainer-3", "offload", "offload-2")
RAY_OPTIONS = ("--node-replace-s", "25", "--rebuild-operations", "100000")
RAY_JOBS = ("policy", "trainer", "offload")
RAY_PARTS = Parts(
    head=("plexrl.scheduler", "plexrl.router", SUPERVISOR),
    node=("plexrl.statemanager", RANK, RAYLET),
)


@pytest.fixture(scope="module")
def duration_s(pytestconfig: pytest.Config) -> float:
    """Time in which faults happen."""
    return float(pytestconfig.getoption("--fault-seconds"))


@pytest.fixture(scope="module")
def seed(pytestconfig: pytest.Config) -> int:
    """What moments, order and victims of the faults follow from."""
    return int(pytestconfig.getoption("--fault-seed"))


def say(line: str) -> None:
    """Progress: `pytest -s`, and the report of a failure."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRun:
    """What runs on the hosts, and what may be killed there."""

    start: Callable[[Network], HostCluster]
    jobs: tuple[str, ...]
    parts: Parts = PLAIN


PLAIN_RUN = FaultRun(
    start=lambda network: HostCluster(network, gpus=GPUS, client=CLIENT, config=CONFIG), jobs=JOBS
)
RAY_RUN = FaultRun(
    start=lambda network: RayHosts(
        network, gpus=GPUS, nodes=NODES, client=CLIENT, options=RAY_OPTIONS
    ),
    jobs=RAY_JOBS,
    parts=RAY_PARTS,
)


@pytest.mark.slow
@pytest.mark.timeout(14_400)
@pytest.mark.usefixtures("_namespaces")
def test_six_jobs_survive_faults_of_parts_links_and_hosts(
    tmp_path: Path, seed: int, duration_s: float, pytestconfig: pytest.Config
) -> None:
    with_report(PLAIN_RUN, FaultReport(seed, duration_s, HEAD), tmp_path, pytestconfig)


@pytest.mark.slow
@pytest.mark.timeout(14_400)
@pytest.mark.usefixtures("_namespaces")
def test_jobs_on_ray_survive_faults_of_parts_links_and_hosts(
    tmp_path: Path, seed: int, duration_s: float, pytestconfig: pytest.Config
) -> None:
    pytest.importorskip("ray", reason="needs plexrl[ray]")
    with_report(RAY_RUN, FaultReport(seed, duration_s, HEAD), tmp_path, pytestconfig)


def with_report(
    run: FaultRun, report: FaultReport, scratch: Path, pytestconfig: pytest.Config
) -> None:
    """Run the jobs and the faults, and print the report at the end."""
    try:
        run_with_faults(run, report, scratch)
        report.failure = ""
    except BaseException as error:
        report.failure = f"FAILED: {error}"
        raise
    finally:
        (scratch / "report.txt").write_text(report.text())
        # Without `-s` too.
        with pytestconfig.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
            say(f"\n{report.text()}\n(also in {scratch})")


def run_with_faults(run: FaultRun, report: FaultReport, scratch: Path) -> None:
    """Run the jobs and the faults, and check what they leave."""
    faults = schedule(report.seed, report.duration_s, HEAD, NODES, run.parts)
    say(f"\nseed {report.seed}: {len(faults)} faults in {report.duration_s:g} s")
    with hosts(HEAD, *NODES, CLIENT) as network:
        try:
            cluster = run.start(network)
            journal = JournalCopy(cluster.head.on_disk(cluster.data_dir / "journal.sqlite"))
            config = scheduler_config(cluster)
            jobs = Jobs(
                cluster,
                dict.fromkeys(run.jobs, 0),
                workers=WORKERS,
                # All steps are repeated after the loss of a host, and in the run without faults.
                pause_s=max(1.0, report.duration_s / 450.0),
            )
            jobs.begin()
            before = jobs.steps()

            def check() -> None:
                jobs.check_alive()
                if cluster.head.has_power:
                    journal.take()

            injector = Injector(cluster, lambda: sum(jobs.steps().values()), say)
            report.outcomes = injector.outcomes
            try:
                injector.run(faults, check)
            finally:
                report.steps = made(before, jobs.steps())
            steps = {name: count + 3 for name, count in jobs.steps().items()}
            say(f"the last fault is over; the jobs end after these steps: {steps}")
            jobs.end_at(steps)
            found = jobs.weights(check)
            journal.take()
            cluster.end()
            check_evidence(report, read_history(journal, config), edges_of(cluster))
            say("the same steps on one machine, without faults")
            assert found == undisturbed(steps), "the final weights differ"
        except BaseException:
            keep_logs(network, scratch)
            raise


def check_evidence(report: FaultReport, history: History, edges: Sequence[Edge]) -> None:
    """What journal and logs must show."""
    report.operations, report.resent = len(history.submitted), history.resent
    report.runs = len(edges) // 2
    check_operations(history)
    check_one_holder(edges, history.groups)
    report.check_effects()


def scheduler_config(cluster: HostCluster) -> SchedulerConfig:
    """What the head's scheduler was started with."""
    (path,) = cluster.head.path("/tmp").glob("plexrl-*/scheduler.json")
    return load_config(path, SchedulerConfig)


def edges_of(cluster: HostCluster) -> list[Edge]:
    """What the workers of all nodes logged, those of a lost node included."""
    pattern = f"{str(cluster.node_data_dir).lstrip('/')}/logs/*/*/*.log"
    disks = [host.on_disk("/") for host in cluster.network]
    return read_edges(path for disk in disks for path in disk.glob(pattern))


def keep_logs(network: Network, scratch: Path) -> None:
    """Keep the logs of all hosts, which are removed with the hosts."""
    for host in network:
        root = host.on_disk("/")
        for path in (*root.glob("root/.plexrl*/**/*.log*"), *root.parent.glob(f"{host.name}.*")):
            target = scratch / host.name / path.relative_to(root.parent)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target)
    journal = network[HEAD].on_disk(HostCluster.data_dir)
    for path in journal.glob("journal.sqlite*"):
        shutil.copy2(path, scratch)


def undisturbed(steps: Mapping[str, int]) -> dict[str, str]:
    """The weights of the same jobs on one machine, where nothing fails."""
    with hosts("solo") as network:
        (host,) = network
        cluster = SoloCluster(host, gpus=WORKERS + 1)
        jobs = Jobs(cluster, steps, workers=WORKERS, pause_s=0.0)
        jobs.begin()
        found = jobs.weights()
        cluster.end()
    return found


def test_a_seed_gives_one_schedule() -> None:
    assert schedule(1, 240.0, HEAD, NODES) == schedule(1, 240.0, HEAD, NODES)
    assert schedule(1, 240.0, HEAD, NODES) != schedule(2, 240.0, HEAD, NODES)


def test_a_schedule_has_every_part_and_every_link_until_a_node_is_lost() -> None:
    faults = schedule(3, 1800.0, HEAD, NODES)
    assert all(b.at_s - a.at_s > CUT_S for a, b in pairwise(faults))
    assert any(fault.what == REBOOT and fault.host == HEAD for fault in faults)
    killed = {fault.target for fault in faults if fault.what == KILL}
    assert killed == {*PLAIN.head, *PLAIN.node}
    cut = {frozenset((fault.host, fault.target)) for fault in faults if fault.what == CUT}
    assert cut == {frozenset(pair) for pair in combinations((HEAD, *NODES), 2)}
    (loss,) = [fault for fault in faults if fault.what == LOSE]
    later = faults[faults.index(loss) + 1 :]
    assert later
    assert all(loss.host not in (fault.host, fault.target) for fault in later)
