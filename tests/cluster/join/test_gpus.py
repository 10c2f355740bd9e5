"""The GPUs of a machine: found, given, or missing."""

import asyncio
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from plexrl.cluster.config.node_options import NodeOptions
from plexrl.cluster.config.options import ClusterOptions, PartSettings
from plexrl.cluster.config.ray_options import RayOptions
from plexrl.cluster.join.tokens import VERSION
from plexrl.cluster.node.gpus import (
    MIB,
    VIRTUAL_GPUS,
    Gpus,
    chosen_gpus,
    find_gpus,
    first_gpus,
    required_gpus,
)
from plexrl.cluster.node.parts import NodeConfig, node_parts, options_of_nodes, with_memory
from plexrl.cluster.ray.machine import RayMachineActor
from plexrl.cluster.ray.node import RayNodeActor, parts_here
from plexrl.cluster.ray.nodes import _NodeActor
from plexrl.errors import CapacityError, InvalidRequestError
from plexrl.events.config import BrokerConfig
from plexrl.process.folders.folders import Folders
from plexrl.process.ray_connection import RayNode
from plexrl.statemanager.device.cuda.bindings import device_names

TWO = ("81559, [N/A], GPU-a, NVIDIA H100", "40960, Disabled, GPU-b, A100, MIG")
DRIVER = """
class Uuid:
    def __init__(self, number):
        self.bytes = bytes([number] * 16)

def cuInit(flags): return 0,
def cuDeviceGetCount(): return 0, {count}
def cuDeviceGet(index): return 0, index
def cuDeviceTotalMem(device): return 0, (device + 1) << 34
def cuDeviceGetName(size, device): return 0, b"{name}" + bytes(9)
def cuDeviceGetUuid(device): return 0, Uuid(device)
"""
PART = "NVIDIA H200 MIG 1g.18gb"


def nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, rows: tuple[str, ...]) -> None:
    """A program in place of NVIDIA's, with the output of a machine with these GPUs."""
    program = folder / "nvidia-smi"
    printed = "".join(f"{row}\\n" for row in rows)
    program.write_text(f"#!/bin/sh\nprintf '{printed}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


@pytest.fixture
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia_smi(tmp_path, monkeypatch, TWO)


@pytest.fixture
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    if find_gpus().count:
        pytest.skip("this machine has GPUs")
    monkeypatch.setenv("PATH", "")


def driver(
    folder: Path, monkeypatch: pytest.MonkeyPatch, visible: str, count: int = 1, name: str = PART
) -> None:
    """A CUDA driver in place of NVIDIA's, that sees these devices."""
    package = folder / "cuda" / "bindings"
    package.mkdir(parents=True)
    for each in (folder / "cuda", package):
        (each / "__init__.py").touch()
    (package / "driver.py").write_text(DRIVER.format(count=count, name=name))
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)


@pytest.mark.usefixtures("two_gpus")
def test_gpus_are_found_and_the_smallest_counts() -> None:
    found = Gpus(
        count=2,
        memory_bytes=40_960 * MIB,
        uuids=("GPU-a", "GPU-b"),
        kind="A100, MIG",
    )
    assert find_gpus() == found
    for choose in (chosen_gpus, required_gpus):
        assert choose(None, None) == choose(2, None) == found
        first = Gpus(count=1, memory_bytes=81_559 * MIB, uuids=("GPU-a",), kind="NVIDIA H100")
        assert choose(1, None) == first
        with pytest.raises(CapacityError, match="has 2 GPUs, and --gpus asks for 3"):
            choose(3, None)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("choose", [chosen_gpus, required_gpus])
def test_virtual_gpus_are_those_that_are_asked_for_by_name(
    choose: Callable[[int | None, int | None], Gpus],
) -> None:
    assert choose(None, 8) == choose(0, 8) == Gpus(count=8, memory_bytes=0)
    assert choose(0, None) == Gpus(count=VIRTUAL_GPUS, memory_bytes=0)
    assert str(choose(None, 8)) == "8 virtual, whose workers compute on the CPU"
    assert str(find_gpus()) == "2 x A100, MIG"


@pytest.mark.usefixtures("no_gpus")
def test_a_cluster_of_a_machine_without_gpus_has_virtual_ones() -> None:
    assert chosen_gpus(None, None) == Gpus(count=VIRTUAL_GPUS, memory_bytes=0)
    with pytest.raises(CapacityError, match="no NVIDIA GPU, and --gpus asks for 1: install"):
        chosen_gpus(1, None)


@pytest.mark.usefixtures("no_gpus")
def test_a_machine_without_gpus_does_not_join_with_virtual_ones_unasked() -> None:
    with pytest.raises(CapacityError, match="--virtual-gpus"):
        required_gpus(None, None)
    assert required_gpus(None, 3) == Gpus(count=3, memory_bytes=0)


def test_real_and_virtual_gpus_exclude_each_other(tmp_path: Path) -> None:
    for options in (ClusterOptions, NodeOptions):
        with pytest.raises(InvalidRequestError, match="give one of the two"):
            options(data_dir=tmp_path, gpus=1, virtual_gpus=1)
    with pytest.raises(InvalidRequestError, match="one node serves the GPUs"):
        ClusterOptions(data_dir=tmp_path, gpus=2, nodes=2)


@pytest.mark.usefixtures("two_gpus")
def test_of_a_machine_under_ray_as_many_gpus_are_used_as_ray_counts() -> None:
    assert first_gpus(1) == Gpus(
        count=1, memory_bytes=81_559 * MIB, uuids=("GPU-a",), kind="NVIDIA H100"
    )
    assert first_gpus(2) == find_gpus()
    with pytest.raises(CapacityError, match="--num-gpus 2"):
        first_gpus(3)


@pytest.mark.usefixtures("no_gpus")
def test_what_ray_counts_without_a_gpu_is_virtual() -> None:
    assert first_gpus(2) == Gpus(count=2, memory_bytes=0)


def on_ray(tmp_path: Path, gpus: int) -> tuple[ClusterOptions, Folders, NodeConfig]:
    options = ClusterOptions(data_dir=tmp_path / "data")
    return options, Folders.of(options.data_dir), NodeConfig(node="n", gpus=gpus)


def test_ray_learns_of_a_node_what_it_needs_and_no_password(tmp_path: Path) -> None:
    """All who use a Ray cluster can read the arguments of its actors."""
    settings = PartSettings(
        statemanager={"data_threads": 3},
        agent={"cores": [1]},
        scheduler={"secret": "hidden"},
        router={"secret": "hidden"},
    )
    options = ClusterOptions(
        data_dir=tmp_path / "data",
        journal="postgresql://plexrl:hidden@db/journal",
        otlp_endpoint="http://host/v1/traces",
        events=BrokerConfig(url="mqtt://plexrl@host", password="hidden"),
        checkpoint_url="s3://bucket/checkpoints",
        gpu_memory_bytes=5,
        host_memory_bytes=6,
        nvme_bytes=7,
        settings=settings,
    )
    told = options_of_nodes(options)
    folders, node = Folders.of(options.data_dir), NodeConfig(node="n", gpus=1)
    place = RayNode(node_id="0", node="n", address="127.0.0.1", gpus=1, resource="GPU")
    sent = _NodeActor(options, RayOptions(address="auto"), folders, place, None)._here
    assert b"hidden" in pickle.dumps(options)
    assert b"hidden" not in pickle.dumps(sent)
    assert sent[0] == told
    assert node_parts(told, folders, node) == node_parts(options, folders, node)


@pytest.mark.usefixtures("two_gpus")
def test_a_node_of_ray_computes_on_the_gpus_that_ray_counts(tmp_path: Path) -> None:
    options, folders, node = on_ray(tmp_path, gpus=1)
    statemanager, agent = parts_here(options, folders, node, has_gpus=True)
    assert statemanager.config["device"] == "cuda"
    assert agent.config["gpu_uuids"] == ["GPU-a"]
    assert agent.config["gpu_kind"] == "NVIDIA H100"
    assert agent.config["gpu_memory_bytes"] == 81_559 * MIB
    statemanager, agent = parts_here(options, folders, node, has_gpus=False)
    assert (statemanager.config["device"], agent.config["gpu_uuids"]) == ("cpu", [])


@pytest.mark.usefixtures("two_gpus")
def test_nodes_of_ray_refuse_more_gpus_than_the_machine_has(tmp_path: Path) -> None:
    options, folders, node = on_ray(tmp_path, gpus=3)
    folders.make()
    group = object()
    with pytest.raises(CapacityError, match="Ray counts 3 GPUs"):
        asyncio.run(RayNodeActor().start(options, folders, node, group, "GPU"))
    joining = NodeOptions(data_dir=tmp_path / "node", gpus=3)
    token = f"{VERSION}.{'0' * 64}.{'a' * 43}"
    with pytest.raises(CapacityError, match="Ray counts 3 GPUs"):
        asyncio.run(RayMachineActor().start(joining, "tls://h:1", token, group, "GPU"))


@pytest.mark.parametrize("visible", ["", "0", "MIG-a,MIG-b"])
def test_a_part_of_a_gpu_that_is_not_the_only_one_named_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str
) -> None:
    driver(tmp_path, monkeypatch, visible)
    with pytest.raises(CapacityError, match="CUDA_VISIBLE_DEVICES=MIG-"):
        required_gpus(None, None)
    assert required_gpus(None, 2) == Gpus(count=2, memory_bytes=0), "they need none of its parts"


def test_a_part_of_a_gpu_is_a_device_of_its_name_and_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver(tmp_path, monkeypatch, "MIG-a")
    assert find_gpus() == Gpus(count=1, memory_bytes=1 << 34, uuids=("MIG-a",), kind=PART)
    assert device_names([bytes(16)]) == ("MIG-a",), "the StateManager finds it by the same name"


def test_whole_gpus_have_names_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver(tmp_path, monkeypatch, "0,1", count=2, name="NVIDIA H200")
    uuids = ("GPU-00000000-0000-0000-0000-000000000000", "GPU-01010101-0101-0101-0101-010101010101")
    assert find_gpus() == Gpus(count=2, memory_bytes=1 << 34, uuids=uuids, kind="NVIDIA H200")


def test_a_divided_gpu_is_refused_without_the_bindings_of_cuda(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvidia_smi(tmp_path, monkeypatch, ("143771, Enabled, GPU-a, NVIDIA H200",))
    with pytest.raises(CapacityError, match="nvidia-smi -mig 0"):
        required_gpus(None, None)


def test_a_machine_whose_gpus_cannot_be_listed_is_not_silently_one_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    nvidia_smi(tmp_path, monkeypatch, ("Failed to initialize NVML: Unknown Error",))
    assert first_gpus(2) == Gpus(count=2, memory_bytes=0)
    assert "nvidia-smi --query-gpu=" in caplog.text
    assert "does not list the GPUs" in caplog.text


@pytest.mark.usefixtures("two_gpus")
def test_the_only_node_of_a_machine_serves_its_gpus(tmp_path: Path) -> None:
    options = ClusterOptions(data_dir=tmp_path / "data")
    folders = Folders.of(options.data_dir)
    folders.make()
    gpus = chosen_gpus(options.gpus, options.virtual_gpus)
    sized = with_memory(options, gpus)
    statemanager, agent = node_parts(sized, folders, NodeConfig.local(sized, 0, gpus))
    assert statemanager.config["device"] == "cuda"
    assert agent.config["gpu_uuids"] == ["GPU-a", "GPU-b"]
    assert agent.config["gpu_memory_bytes"] == 40_960 * MIB
    assert agent.config["gpus"] == 2
    folders.remove()
