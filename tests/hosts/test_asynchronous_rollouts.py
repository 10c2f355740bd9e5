"""Asynchronous rollouts over hosts: instances and trainer each on a host of its own, the rollout
service on the head."""

import json
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.asynchronous_controller import PROMPTS, SAMPLES, STALENESS
from tests.hosts.cluster import HostCluster
from tests.hosts.host import Host, HostProcess
from tests.hosts.network import hosts

Plain = dict[str, Any]
CONTROLLER = Path(__file__).with_name("asynchronous_controller.py")
PORT = 8473
ROUTER_PORT = 8500
LIMIT_S = 900.0
CONFIG = f"""
[rollout]
listen = ["tls://0.0.0.0:{PORT}"]
instance_lost_s = 5.0
"""
CERTIFY = """
import sys
from pathlib import Path
from plexrl.cluster.join.authority import Authority
from plexrl.wire.links.credentials import Identity, Role
Authority.open(Path(sys.argv[1], "authority")).issue(
    Path(sys.argv[1], "elsewhere"), Identity(Role.ROUTER, "elsewhere")
)
"""
CONNECT = """
import asyncio, sys
from plexrl.errors import PlexRLError
from plexrl.wire.links.address import parse_address
from plexrl.wire.links.credentials import Credentials, Role, TlsFiles
from plexrl.wire.links.dial import connect
ca, certificate, key, address = sys.argv[1:]
files = TlsFiles(ca=ca, certificate=certificate, key=key)
try:
    asyncio.run(connect(parse_address(address), Credentials(files), role=Role.ROLLOUT))
    print("accepted")
except PlexRLError as error:
    print(error.code, error.message)
"""


class Training:
    """The controller, and what it has recorded."""

    def __init__(self, cluster: HostCluster) -> None:
        self.cluster = cluster
        self._process: HostProcess = cluster.client.start(
            "python", str(CONTROLLER), env=cluster.environment
        )
        self.job = self._process.wait_for("ready ", LIMIT_S).split()[1]

    def batches(self) -> list[Plain]:
        """The recorded batches."""
        lines = self._process.text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def state(self) -> Plain:
        """The rollout, as an operator sees it."""
        found = self.cluster.ask("rollouts", self.job)
        assert len(found) == 1
        return dict(found[0])

    def go_on(self, batches: int) -> None:
        """Wait for so many further batches."""
        wanted = len(self.batches()) + batches
        self.until(lambda: len(self.batches()) >= wanted, f"no batch {wanted}")

    def until(self, is_so: Callable[[], bool], otherwise: str) -> None:
        """Wait, and keep the hosts' services running."""
        deadline = time.monotonic() + LIMIT_S
        while not is_so():
            self.cluster.keep_running()
            code = self._process.poll()
            assert code is None, f"the controller ended: {self._process.text()[-4000:]}"
            assert time.monotonic() < deadline, f"{otherwise}; {len(self.batches())} batches"
            time.sleep(0.1)

    def kill_service(self) -> None:
        """`kill -9` the rollout service while samples are drawn."""
        self.until(self._is_drawing, "nothing is generated")
        (service,) = self.cluster.processes_of(self.cluster.head, "plexrl.rollout")
        service.send_signal(signal.SIGKILL)
        service.wait(30)

    def _is_drawing(self) -> bool:
        return any(each["trajectories"] for each in self.state()["instances"].values())

    def end(self) -> Plain:
        """End the training; returns the rollout's last state."""
        self._process.send("end\n")
        line = self._process.wait_for("end {", LIMIT_S)
        assert self._process.wait(LIMIT_S) == 0
        found: Plain = json.loads(line.removeprefix("end "))
        return found


def node_of(training: Training, deployment: str) -> Host:
    """The host of a deployment of one worker."""
    (job,) = training.cluster.ask("jobs")
    (nodes,) = (
        {rank["node"] for rank in each["ranks"]}
        for each in job["deployments"]
        if each["deployment"].endswith(f"/{deployment}")
    )
    (name,) = nodes
    return training.cluster.network[name]


def check(batches: list[Plain], end: Plain) -> None:
    """The recorded data: the bound is kept, each prompt is trained once, and none is lost."""
    assert [each["version"] for each in batches] == list(range(len(batches)))
    for each in batches:
        for versions, spans, tokens in zip(
            each["sample_versions"], each["weights"], each["tokens"], strict=True
        ):
            assert len(versions) == SAMPLES
            assert tokens == [200] * SAMPLES
            for oldest, drawn_with in zip(versions, spans, strict=True):
                assert oldest >= each["version"] - STALENESS
                assert min(drawn_with) >= oldest
                assert max(drawn_with) <= each["version"]
    trained = [number for each in batches for number in each["numbers"]]
    assert len(set(trained)) == len(trained) == PROMPTS * len(batches)
    texts = [tuple(prompt) for each in batches for prompt in each["prompts"]]
    assert len(set(texts)) == len(texts)
    assert end["dropped"] == 0
    # What was given is trained or in flight, and in flight is no more than the bound admits.
    given = set(range(end["next_group"]))
    assert set(trained) <= given
    assert len(given - set(trained)) * SAMPLES == end["in_flight"]
    assert end["in_flight"] <= (STALENESS + 1) * PROMPTS * SAMPLES
    assert end["totals"]["trained"]["samples"] == len(trained) * SAMPLES
    assert sum(end["staleness_seen"].values()) == len(trained) * SAMPLES
    assert set(end["staleness_seen"]) <= {str(age) for age in range(STALENESS + 1)}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("_namespaces")
def test_training_goes_on_while_an_instances_host_and_the_service_are_killed() -> None:
    with hosts("head", "a", "b", "c") as network:
        cluster = HostCluster(network, gpus=1, config=CONFIG)
        training = Training(cluster)
        places = {name: node_of(training, name) for name in ("actor", "rollout-0", "rollout-1")}
        assert len({host.name for host in places.values()}) == 3
        training.go_on(2)
        training.kill_service()
        training.go_on(2)
        lost = places["rollout-1"]
        lost.power_off()
        training.go_on(3)
        assert training.state()["instances"]["rollout-1"]["state"] == "lost"
        training.kill_service()
        training.go_on(2)
        lost.power_on()
        training.until(
            lambda: training.state()["instances"]["rollout-1"]["state"] == "joined",
            "the instance did not come back",
        )
        training.go_on(3)
        end = training.end()
        found = end["instances"]["rollout-0"]
        assert found["pulls"] > 0
        assert found["transfer_s"] > 0, "no version was fetched ahead of its pull"
        sys.stdout.write(f"{len(training.batches())} batches, staleness {end['staleness_seen']}\n")
        check(training.batches(), end)
        cluster.end()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("_namespaces")
def test_a_router_of_another_host_reaches_the_service_and_a_node_does_not() -> None:
    with hosts("head", "a") as network:
        cluster = HostCluster(network, gpus=1, config=CONFIG)
        head, node = cluster.head, cluster.nodes[0]
        folder = f"{cluster.data_dir}/elsewhere"
        head.run("python", "-c", CERTIFY, str(cluster.data_dir))
        node.path(folder).mkdir(parents=True)
        for file in head.path(folder).iterdir():
            node.path(f"{folder}/{file.name}").write_bytes(file.read_bytes())
        address = f"tls://{head.name}:{PORT}"
        tls = {
            "ca": f"{folder}/ca.pem",
            "certificate": f"{folder}/router-elsewhere.pem",
            "key": f"{folder}/router-elsewhere.key",
        }
        accepted = node.run("python", "-c", CONNECT, *tls.values(), address)
        assert accepted.stdout == "accepted\n"
        config = {
            "router": "elsewhere",
            "scheduler": [f"tls://{head.name}:8472"],
            "rollout": address,
            "tls": tls,
            "host": "127.0.0.1",
            "port": ROUTER_PORT,
            "data_dir": f"{folder}/data",
        }
        node.path(f"{folder}/router.json").write_text(json.dumps(config))
        router = node.start("python", "-m", "plexrl.router", "--config", f"{folder}/router.json")
        router.wait_for('"ready"')
        own = {**cluster.environment, "PLEXRL_URL": f"http://127.0.0.1:{ROUTER_PORT}"}
        del own["PLEXRL_CA_FILE"]
        assert json.loads(node.run("plexrl", "rollouts", "--json", env=own).stdout) == []
        router.end()
        own_folder = f"{cluster.node_data_dir}/certificates/current"
        files = [f"{own_folder}/{name}" for name in ("ca.pem", "node.pem", "node.key")]
        refused = node.run("python", "-c", CONNECT, *files, address)
        assert refused.stdout.startswith("permission_denied this port is for a router")
        cluster.end()
