"""The RL benchmark of a GPU, on the CPU: the same code, so that a GPU is not needed to debug it."""

import json
import subprocess
import sys

from benchmarks.report import ROOT


def test_jobs_that_take_turns_learn_the_same_as_alone() -> None:
    command = [sys.executable, "-m", "benchmarks.gpu.rl", "--quick", "--cpu", "--json"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    figures = json.loads(found.stdout.splitlines()[-1])["figures"]
    assert figures["figures_difference_max"] == 0
    assert figures["states_of_device"] > 1
