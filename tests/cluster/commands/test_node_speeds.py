"""An operator says how fast the nodes of a live cluster are; training goes to the fastest."""

import json
import os
import re
import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner

import plexrl
from plexrl.cli.app import app
from plexrl.cluster.config.options import ClusterOptions
from plexrl.cluster.embedded.start import start_embedded
from plexrl.cluster.node.gpus import Gpus
from plexrl.cluster.node.parts import NodeConfig, node_parts
from plexrl.errors import InvalidRequestError
from plexrl.process.children.startup import parse_config
from plexrl.process.folders.folders import Folders
from plexrl.worker.interface.config import AgentConfig
from tests.cluster.tools import VOCABULARY, process_of, wait_until

MODEL = plexrl.tiny_qwen2(VOCABULARY, seed=5)


def wait_for_place(deployment: plexrl.TrainDeployment) -> set[str]:
    """The nodes that it is placed on; its workers need not have started."""
    wait_until(lambda: bool(deployment.status()["ranks"]), "it gets no GPUs")
    return {rank["node"] for rank in deployment.status()["ranks"]}


@pytest.mark.parametrize("speeds", [(0.5, 2.0, 1.0), (0.3,), ()])
def test_the_agent_of_each_node_is_told_the_nodes_speed(
    tmp_path: Path, speeds: tuple[float, ...]
) -> None:
    options = ClusterOptions(data_dir=tmp_path, nodes=3, virtual_gpus=1, node_speeds=speeds)
    folders = Folders.of(tmp_path)
    folders.make()
    told = []
    try:
        for index in range(3):
            node = NodeConfig.local(options, index, Gpus(count=1, memory_bytes=1))
            _, agent = node_parts(options, folders, node)
            told.append(parse_config(json.dumps(agent.config), AgentConfig, "agent").node_speed)
    finally:
        folders.remove()
    assert tuple(told) == {3: speeds, 1: speeds * 3, 0: (0.0,) * 3}[len(speeds)]


# `tests/worker/agent/test_agent.py` has what a node says of itself, `tests/scheduler/placement`
# what the scheduler makes of it.
@pytest.mark.slow
def test_training_goes_to_the_node_with_the_highest_speed_also_after_a_restart(
    tmp_path: Path,
) -> None:
    running = start_embedded(
        tmp_path, nodes=3, virtual_gpus=1, node_speeds=(0.5, 2.0, 1.0), policy="isolated"
    )
    try:
        with plexrl.connect(running.url, running.api_key) as cluster:
            with cluster.create_job("one") as job:
                actor = job.train_deployment("actor", MODEL, workers=1)
                assert wait_for_place(actor) == {"node1"}
                os.kill(process_of(running, "plexrl.scheduler").pid, signal.SIGKILL)
                other = job.train_deployment("other", MODEL, workers=1)
                assert wait_for_place(other) == {"node2"}
            found = {node["node"]: node["speed"] for node in cluster.nodes()}
            assert found == {"node0": 0.5, "node1": 2.0, "node2": 1.0}
        where = {"PLEXRL_URL": running.url, "PLEXRL_API_KEY": running.api_key}
        printed = json.loads(CliRunner().invoke(app, ["nodes", "--json"], env=where).output)
        assert {node["node"]: node["speed"] for node in printed} == found
    finally:
        running.close()


@pytest.mark.parametrize("text", ["fast", "1,,2", "nan"])
def test_speeds_that_are_no_numbers_are_refused(text: str, tmp_path: Path) -> None:
    command = ["up", "--data-dir", str(tmp_path), "--nodes", "2", "--virtual-gpus", "1"]
    found = CliRunner().invoke(app, [*command, "--node-speeds", text])
    assert isinstance(found.exception, InvalidRequestError)
    assert re.search("node.speed", found.exception.message)
