"""The GPUs of a machine: found, given, or missing."""

import os
from pathlib import Path

import pytest

from plexrl.cluster.node.gpus import MIB, Gpus, find_gpus, required_gpus
from plexrl.errors import CapacityError


@pytest.fixture
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program in place of NVIDIA's, with the output of a machine with two GPUs."""
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\nprintf '81559, GPU-a, NVIDIA H100\\n40960, GPU-b, A100, MIG\\n'\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.usefixtures("two_gpus")
def test_gpus_are_found_and_the_smallest_counts() -> None:
    found = Gpus(
        count=2,
        memory_bytes=40_960 * MIB,
        uuids=("GPU-a", "GPU-b"),
        kind="A100, MIG",
    )
    assert find_gpus() == found
    assert required_gpus(None) == found
    assert required_gpus(1) == Gpus(count=1, memory_bytes=40_960 * MIB)
    assert required_gpus(4) == Gpus(count=4, memory_bytes=0), "virtual ones have no size of theirs"


def test_a_machine_without_gpus_needs_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    if find_gpus().count:
        pytest.skip("this machine has GPUs")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(CapacityError, match="--gpus"):
        required_gpus(None)
    assert required_gpus(3) == Gpus(count=3, memory_bytes=0)
