"""The compiled core and event loop make the same decisions as Python."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

COMMAND = "from plexrl.cli.app import main; main()"
POLICY = "spread+backfill"

REPLAY = """
import dataclasses, json, sys
from plexrl.sim.state.node_types import NODE_TYPES
from plexrl.sim.workload.policies import SIM_POLICIES
from plexrl.sim.engine.simulate import is_compiled, simulate
from plexrl.sim.results.result_json import NO_SPEED
from plexrl.sim.workload.scenario import Behaviour, Pool, Scenario
from plexrl.sim.workload.source.trace_source import TraceSource

found = {"compiled": is_compiled()}
for name in SIM_POLICIES:
    scenario = Scenario(
        source=TraceSource.at(sys.argv[1]),
        pools=(Pool(nodes=48), Pool(nodes=24, node_type=NODE_TYPES["a100"])),
        policy=name,
        behaviour=Behaviour(jitter=0.15),
        check=True,
    )
    found[name] = repr(dataclasses.replace(simulate(scenario), speed=NO_SPEED))
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_compiled_and_not_every_policy_gives_the_same_result(tmp_path: Path) -> None:
    source, site = tmp_path / "source", tmp_path / "site"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("plexrl", "examples", "benchmarks"):
        ignored = shutil.ignore_patterns("*.so", "__pycache__")
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    trace = tmp_path / "trace.csv"
    run([sys.executable, "-c", COMMAND, "traces", "generate", str(trace), "--jobs", "40"], source)
    replay = [sys.executable, "-c", REPLAY, str(trace)]
    # Before the build: it leaves the extensions in the sources, too.
    pure = json.loads(run(replay, source))
    decide = [sys.executable, "-m", "benchmarks.simulating.command_log", POLICY]
    decisions = run(decide, source)
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", str(site)]
    run([*pip, str(source)], tmp_path, HATCH_BUILD_HOOKS_ENABLE="true")
    compiled = json.loads(run(replay, site))
    assert (pure.pop("compiled"), compiled.pop("compiled")) == (False, True)
    assert len(pure) == 11
    assert compiled == pure
    shutil.copytree(source / "benchmarks", site / "benchmarks")
    assert run(decide, site) == decisions


def run(command: list[str], where: Path, **variables: str) -> str:
    """What it prints; packages of `where` come first."""
    environment = {**os.environ, "PYTHONPATH": str(where), **variables}
    if command[1:4] == ["-m", "pip", "install"]:
        del environment["PYTHONPATH"]
    ended = subprocess.run(
        command, cwd=where, env=environment, capture_output=True, text=True, check=False
    )
    assert not ended.returncode, ended.stdout + ended.stderr
    return ended.stdout
