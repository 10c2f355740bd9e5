"""One unchanged controller script on every training backend and layout."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import plexrl
from plexrl.cluster.embedded.start import EmbeddedCluster
from plexrl.model.capabilities import BACKENDS
from plexrl.model.parallelism import Parallelism

EXAMPLE = Path(__file__).parents[3] / "examples" / "grpo_digits.py"
LIBRARIES = {"megatron": "megatron.core", "deepspeed": "deepspeed"}
LAYOUTS = ("dp=2", "dp=1,tp=2", "pp=2", "cp=2")
"""Each backend runs the layouts that it supports."""
TIMEOUT_S = 240


def runs() -> list[object]:
    """(backend, layout) of every run, all but the first of them slow."""
    found = [
        (each.backend, layout)
        for each in BACKENDS
        for layout in LAYOUTS
        if each.kind == "train" and set(Parallelism.from_text(layout).axes_used()) <= set(each.axes)
    ]
    assert {backend for backend, _ in found} == {b.backend for b in BACKENDS if b.kind == "train"}
    return [
        pytest.param(*run, marks=[] if run == ("fsdp", "dp=1,tp=2") else [pytest.mark.slow])
        for run in found
    ]


@pytest.mark.parametrize(("backend", "layout"), runs())
def test_one_argument_selects_the_backend(
    embedded: EmbeddedCluster, cluster: plexrl.Cluster, backend: str, layout: str
) -> None:
    library = LIBRARIES.get(backend)
    if library is not None and importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    name = f"{backend}-{layout.replace('=', '').replace(',', '-')}"
    ended = subprocess.run(
        [
            *(sys.executable, str(EXAMPLE), "--task", "reverse", "--name", name),
            *("--steps", "1", "--warm-up-steps", "2", "--seed", "2"),
            *("--backend", backend, "--layout", layout),
        ],
        env={
            **os.environ,
            "PYTHONPATH": str(EXAMPLE.parent.parent),
            "PLEXRL_URL": embedded.url,
            "PLEXRL_API_KEY": embedded.api_key,
        },
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "after 1 steps" in ended.stdout
    (job,) = (job for job in cluster.jobs() if job["name"] == name)
    assert job["state"].lower() == "completed"
    trained = cluster.attach_job(job["job"], heartbeat=False).deployment_status("actor")
    spec = json.loads(trained["spec_json"])
    assert spec["backend"] == backend
    assert Parallelism(**spec["parallelism"]) == Parallelism.from_text(layout)
