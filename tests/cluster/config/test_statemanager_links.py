"""What a node's agent announces is where its StateManager serves other nodes."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from plexrl.cluster.config.options import ClusterOptions, PartSettings
from plexrl.cluster.node.parts import NodeConfig, NodeLinks, node_parts
from plexrl.process.children.startup import parse_config
from plexrl.process.folders.folders import Folders
from plexrl.wire.links.credentials import Role
from plexrl.worker.interface.config import AgentConfig
from tests.certificates import TestAuthority
from tests.free_ports import free_port

needs_nixl = pytest.mark.skipif(
    find_spec("nixl") is None,
    reason="the package nixl is not installed: pip install 'plexrl[nixl]'",
)


@pytest.mark.parametrize(
    ("fabric", "settings", "scheme"),
    [
        ("", {}, "tls://gpu7@"),
        ("trusted", {}, "tcp://"),
        pytest.param(
            "trusted", {"serve_nixl": True}, "nixl://", marks=(needs_nixl, pytest.mark.slow)
        ),
    ],
)
def test_the_announced_address_is_that_of_the_running_statemanager(
    tmp_path: Path, fabric: str, settings: dict[str, object], scheme: str
) -> None:
    port = free_port()
    options = ClusterOptions(
        data_dir=tmp_path,
        host_memory_bytes=64 << 20,
        nvme_bytes=64 << 20,
        settings=PartSettings(statemanager=settings),
    )
    links = NodeLinks(
        scheduler=("tls://head@127.0.0.1:1",),
        tls=TestAuthority(tmp_path / "cluster").files(Role.NODE, "gpu7"),
        host="127.0.0.1",
        ports=(port, port + 200),
        fabric=fabric,
    )
    folders = Folders.of(tmp_path)
    folders.make()
    try:
        statemanager, agent = node_parts(options, folders, NodeConfig(node="gpu7", gpus=1), links)
        announced = parse_config(
            json.dumps(agent.config), AgentConfig, "agent"
        ).statemanager_address
        assert announced == f"{scheme}127.0.0.1:{port}"
        words = ["-m", statemanager.module, "--config-json", json.dumps(statemanager.config)]
        command = [sys.executable, *words, "--end-with-parent"]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            try:
                assert json.loads(process.stdout.readline())["serve_tcp"] == announced
            finally:
                process.terminate()
    finally:
        folders.remove()
