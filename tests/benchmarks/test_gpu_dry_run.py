"""Benchmarks of a GPU, on the CPU: the same code, so that a GPU is not needed to debug it."""

import json
import re
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from benchmarks import engine
from benchmarks.gpu import check, cuda_checkpoint, generation, rl
from benchmarks.report import ROOT
from tests.statemanager.emulated_cuda import EmulatedCuda


def dry_run(name: str) -> dict[str, float]:
    """The figures of a benchmark."""
    command = [sys.executable, "-m", f"benchmarks.gpu.{name}", "--quick", "--cpu", "--json"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    return dict(json.loads(found.stdout.splitlines()[-1])["figures"])


# `tests/cluster/sharing/test_multiplexing.py` has it on a cluster.
@pytest.mark.slow
def test_jobs_that_take_turns_learn_the_same_as_alone() -> None:
    figures = dry_run("rl")
    assert figures["figures_difference_max"] == 0
    assert figures["states_of_device"] > 1


def test_other_memory_of_a_gpu_is_occupied_meanwhile() -> None:
    driver = EmulatedCuda(f"gpu-{uuid.uuid4().hex[:8]}", device_bytes=16 << 20)
    driver.enter(0)
    left = 5 << 20
    with rl.memory_of(driver, left) as bound:
        assert bound is None
        assert left <= driver.memory_info()[0] < left + driver.granularity(0)
    assert driver.memory_info()[0] == 16 << 20


@pytest.mark.slow
def test_two_jobs_of_a_cluster_share_a_gpu() -> None:
    figures = dry_run("cluster")
    assert figures["gpu_seconds_step_shared"] > 0


# `tests/worker/rollout/engine/test_forward_selection.py` has it without the benchmark.
@pytest.mark.slow
def test_the_engine_gives_the_answers_of_transformers() -> None:
    figures = dry_run("generation")
    assert figures["torch_same_answers_share"] == 1
    assert figures["torch_even_tokens_s"] > 0


def test_a_token_that_is_not_the_likeliest_is_found() -> None:
    requests = engine.ragged(4)
    _, answers = engine.by_transformers(engine.MODEL, requests)
    bound = generation.LOGIT_ERROR_MAX["float32"]
    assert generation.largest_logit_error(engine.MODEL, requests, answers) < bound
    answers[1][-1] = 3 + (answers[1][-1] - 2) % 90
    assert generation.largest_logit_error(engine.MODEL, requests, answers) > bound


def test_all_tests_of_gpus_are_in_the_check() -> None:
    """By folder, because others import what a GPU machine lacks."""
    words = [word for _, words in check.PARTS.values() for word in words]
    places = [ROOT / word for word in words if word.startswith("tests/")]
    for path in (ROOT / "tests").rglob("test_*.py"):
        if re.search(r"\bRIGS\b|pytest\.mark\.gpu\b", path.read_text()) and path != Path(__file__):
            assert any(path.is_relative_to(place) for place in places), path


def test_figures_of_a_part_are_kept_however_long_its_output_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A part reports several times, and may fail after that."""
    program = """
print('{"figures": {"offload_ratio": 0.95}}')
print("x" * 100000)
print('{"figures": {"load_ratio": 0.5}}', flush=True)
raise SystemExit("no more")
"""
    words = ["-c", program, "benchmarks.gpu.switch"]
    monkeypatch.setitem(check.PARTS, "benchmark", (60, words))
    found = check.part("benchmark", 60)
    assert found["outcome"] == "failed"
    assert found["figures"] == {"offload_ratio": 0.95, "load_ratio": 0.5}
    assert found["bars"]["offload_ratio"] == ">= 0.9: met"
    assert found["bars"]["load_ratio"] == ">= 0.9: missed"
    assert found["output"].endswith("no more\n")
    assert len(found["output"]) == check.TAIL


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
