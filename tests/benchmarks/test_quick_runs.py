"""Every benchmark runs from end to end. What it measures with `--quick` is not judged."""

import ast
import subprocess
import sys

import pytest

from benchmarks.report import ROOT
from benchmarks.run_all import HERE, NOT_RUN, commands

NO_BENCHMARKS = {"bars.py", "report.py", "run_all.py", "sizes.py"}


LONG = {
    *("decode_predictor.py", "delta_sync_hosts.py", "durability.py", "engine.py"),
    *("execution.py", "faults.py"),
    # `test_gpu_dry_run.py` has them.
    *("gpu/cluster.py", "gpu/generation.py", "gpu/rl.py"),
    *("judge_layers.py", "loading.py", "lora_switch.py", "object_store.py"),
    "rewards_overlap.py",
    "tool_turns.py",
    *(
        "rollout_flexes.py",
        "rollout_live.py",
        "rollout_ranker.py",
        "rollout_staleflow.py",
        "rollout_stream.py",
        "rollout_streamrl_pat.py",
        "rollout_tail.py",
    ),
    *("roundtrip.py", "scale.py", "scheduler.py", "simulator.py"),
    *(
        "simulating/cluster.py",
        "simulating/pareto.py",
        "simulating/rollout_gpus.py",
        "simulating/fidelity.py",
        "simulating/mixed_sizes.py",
        "simulating/rollout_sensitivity.py",
        "state/published_pulls.py",
        "state/stored_saves.py",
        "state/stored_steps.py",
    ),
    *("statemanager.py", "switch.py", "tp_switch.py", "update_pause.py"),
    "weight_sync_hosts.py",
}
"""They start hosts, clusters, daemons or hundreds of connections, or simulate for long."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=pytest.mark.slow) if each in LONG else each for each in commands()],
)
def test_a_benchmark_runs_with_quick_and_prints_a_table(name: str) -> None:
    command = [sys.executable, *commands()[name], "--quick"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip(), found.stderr


def test_every_script_is_a_benchmark_that_is_found() -> None:
    scripts = {path.name for path in HERE.glob("*.py")} - NO_BENCHMARKS
    assert scripts == {name for name in commands() if "/" not in name}


def test_only_benchmarks_are_left_out_of_the_results() -> None:
    assert set(NOT_RUN) <= set(commands())


@pytest.mark.parametrize("name", ["run_all.py", "ordering.py"])
def test_help_is_printed_and_nothing_runs(name: str) -> None:
    command = [sys.executable, "-m", f"benchmarks.{name.removesuffix('.py')}", "--help"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    doc = ast.get_docstring(ast.parse((HERE / name).read_text()))
    assert found.stdout.strip() == doc
