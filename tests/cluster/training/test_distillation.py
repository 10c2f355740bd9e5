"""The distillation example, with fewer steps than its default."""

import importlib.util
from pathlib import Path

import pytest

import plexrl

EXAMPLE = Path(__file__).parents[3] / "examples" / "distill_digits.py"


@pytest.mark.slow
def test_a_student_approaches_its_teacher(cluster: plexrl.Cluster) -> None:
    spec = importlib.util.spec_from_file_location("distill_digits", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    with cluster.create_job("distill") as job:
        controller = example.Controller(job, example.parse(["--steps", "25"]))
        before, after = controller.run(plexrl.Progress())
        kls = [row["values"]["kl"] for row in job.metrics()]
    assert len(kls) == 25
    assert 0 < after < 0.75 * before
