"""The oldest SDK that docs/tinker.md names trains, saves and samples, from an environment of its
own: this one has another version."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.router.tinker.clients import Tenant

OLDEST = "0.25.0"
SCRIPT = """
import tinker
from tinker import types

assert tinker.__version__ == "{version}", tinker.__version__
row = [3, 4, 5, 6, 7, 8]
datum = types.Datum(
    model_input=types.ModelInput.from_ints(row[:-1]),
    loss_fn_inputs={{"target_tokens": row[1:], "weights": [1.0] * 5}},
)
client = tinker.ServiceClient()
trainer = client.create_lora_training_client(base_model="tiny", rank=4, seed=1)
losses = []
for _ in range(4):
    forward = trainer.forward_backward([datum], "cross_entropy")
    step = trainer.optim_step(types.AdamParams(learning_rate=1e-2))
    losses.append(forward.result().metrics["loss:sum"])
    step.result()
assert losses[-1] < losses[0], losses
path = trainer.save_state("early").result().path
resumed = client.create_training_client_from_state(path)
assert resumed.forward([datum], "cross_entropy").result().metrics["loss:sum"] < losses[0]
sampler = trainer.save_weights_and_get_sampling_client("s")
prompt = types.ModelInput.from_ints(row[:2])
drawn = sampler.sample(prompt, 2, types.SamplingParams(max_tokens=4)).result()
assert len(drawn.sequences) == 2
print("passed")
"""


@pytest.mark.slow
def test_the_oldest_sdk_trains_saves_resumes_and_samples(tmp_path: Path, tenant: Tenant) -> None:
    packages = tmp_path / "sdk"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
    installed = subprocess.run(
        [*pip, str(packages), f"tinker=={OLDEST}"], capture_output=True, text=True, check=False
    )
    if installed.returncode:
        pytest.skip(f"the package index gives no tinker {OLDEST}: {installed.stderr[-200:]}")
    environment = {
        **os.environ,
        "PYTHONPATH": str(packages),
        "TINKER_BASE_URL": tenant.url,
        "TINKER_API_KEY": tenant.key,
        "TINKER_TELEMETRY": "0",
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(version=OLDEST)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
        check=False,
    )
    assert done.stdout.endswith("passed\n"), done.stderr[-3000:]
