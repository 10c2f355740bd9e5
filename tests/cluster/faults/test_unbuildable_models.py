"""A deployment that workers cannot build ends its job at once, with the reason."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import plexrl
from plexrl.cluster.embedded.start import start_embedded
from plexrl.errors import OperationCancelledError
from tests.cluster.tools import VOCABULARY

MODEL = plexrl.tiny_qwen2(VOCABULARY)
BAD_CONFIG = plexrl.ModelSpec(
    architecture="qwen2", config_json=json.dumps(MODEL.config | {"attention_dropout": "much"})
)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[plexrl.Cluster]:
    """A cluster whose nodes have neither Megatron nor vLLM."""
    hidden = tmp_path_factory.mktemp("hidden")
    (hidden / "sitecustomize.py").write_text(
        "import sys\nsys.modules['megatron'] = sys.modules['vllm'] = None\n"
    )
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", str(hidden), prepend=":")
        running = start_embedded(tmp_path_factory.mktemp("bare"), virtual_gpus=2)
    with plexrl.connect(running.url, running.api_key) as connected:
        yield connected
    running.close()


def model_without_weights(folder: Path) -> plexrl.ModelSpec:
    config = MODEL.config | {"model_type": "qwen2"}
    (folder / "config.json").write_text(json.dumps(config))
    return plexrl.ModelSpec(path=str(folder))


# `test_backend_factory.py` and `test_installation.py` of the worker have what each answers.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "backend", "reason"),
    [("train", "megatron", "needs megatron-core"), ("rollout", "vllm", "needs vLLM")],
)
def test_a_backend_that_is_not_installed_ends_its_job_with_the_reason(
    bare: plexrl.Cluster, kind: str, backend: str, reason: str
) -> None:
    ends_with(bare, kind, backend, MODEL, reason)


@pytest.mark.parametrize(
    ("kind", "backend", "what", "reason"),
    [
        ("train", "fsdp", "config", "attention_dropout"),
        pytest.param("rollout", "torch", "config", "attention_dropout", marks=pytest.mark.slow),
        ("train", "fsdp", "directory", "safetensors"),
        pytest.param("forward", "torch", "directory", "safetensors", marks=pytest.mark.slow),
    ],
)
def test_an_unbuildable_model_ends_its_job_with_the_reason(
    cluster: plexrl.Cluster, tmp_path: Path, kind: str, backend: str, what: str, reason: str
) -> None:
    model = BAD_CONFIG if what == "config" else model_without_weights(tmp_path)
    ends_with(cluster, kind, backend, model, reason)


def ends_with(
    cluster: plexrl.Cluster, kind: str, backend: str, model: plexrl.ModelSpec, reason: str
) -> None:
    """The job of such a deployment fails at once, for this reason."""
    job = cluster.create_job("hopeless")
    view = job._deploy("one", kind, model, {"backend": backend, "workers": 2})
    deployment = plexrl.TrainDeployment(job._transport, view)
    with pytest.raises(OperationCancelledError, match=reason):
        deployment.barrier().result(120)
    [ended] = [each for each in cluster.jobs() if each["job"] == job.job]
    assert ended["state"] == "FAILED"
    assert "cannot be built" in ended["reason"]
    assert deployment.status()["incarnation"] == 1, "no worker died of it"
