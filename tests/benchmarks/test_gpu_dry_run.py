"""Benchmarks of a GPU, on the CPU: the same code, so that a GPU is not needed to debug it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import cuda_checkpoint
from benchmarks.report import ROOT


def test_jobs_that_take_turns_learn_the_same_as_alone() -> None:
    command = [sys.executable, "-m", "benchmarks.gpu.rl", "--quick", "--cpu", "--json"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    figures = json.loads(found.stdout.splitlines()[-1])["figures"]
    assert figures["figures_difference_max"] == 0
    assert figures["states_of_device"] > 1


def test_cuda_checkpoint_is_compared_where_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cuda_checkpoint.switch_s(1 << 20, device="cpu") is None
    calls, utility = tmp_path / "calls", tmp_path / "cuda-checkpoint"
    utility.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n')
    utility.chmod(0o700)
    found = cuda_checkpoint.switch_s(1 << 20, device="cpu")
    assert found is not None
    assert found > 0
    lines = calls.read_text().splitlines()
    assert len(lines) == 2 * cuda_checkpoint.REPEATS
    assert all(line.startswith("--toggle --pid ") for line in lines)
    utility.write_text("#!/bin/sh\nexit 1\n")
    assert cuda_checkpoint.switch_s(1 << 20, device="cpu") is None
