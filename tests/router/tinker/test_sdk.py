"""The unmodified Tinker SDK, against a real cluster."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from safetensors.torch import load_file
from tinker import types
from transformers import AutoModelForCausalLM

from plexrl.cluster.embedded.start import EmbeddedCluster
from tests.router.tinker.clients import LIMIT_S, ROWS, Tenant, datum, prompt, supervised

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")
STEP = types.AdamParams(learning_rate=0.05, eps=1.0, weight_decay=0.1)
"""With an `eps` like this, the size of a gradient matters also in the first step."""
LOSSES: dict[str, dict[str, float]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.05},
    "cispo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.05},
    "dro": {"beta": 0.4},
    "gspo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.2},
}


@pytest.fixture(scope="module")
def client(tenant: Tenant) -> Iterator[tinker.ServiceClient]:
    with tenant.service() as made:
        yield made


@pytest.fixture(scope="module")
def trainer(client: tinker.ServiceClient) -> tinker.TrainingClient:
    made = client.create_lora_training_client(base_model="tiny", rank=8, seed=1)
    return made.result()


def model_logprobs(folder: Path, rows: list[list[int]]) -> list[np.ndarray]:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = []
    for row in rows:
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([row])).logits[0].log_softmax(-1)
        found.append(logits[range(len(row) - 1), row[1:]].numpy())
    return found


def test_a_supervised_loop_lowers_the_loss_and_is_sampled_from_and_resumed(
    client: tinker.ServiceClient, trainer: tinker.TrainingClient, roots: Path
) -> None:
    assert trainer.get_info().lora_rank == 8
    assert trainer.get_tokenizer().encode("12") == [4, 5]
    data, losses = supervised(), []
    for _ in range(6):
        forward = trainer.forward_backward(data, "cross_entropy")
        step = trainer.optim_step(types.AdamParams(learning_rate=1e-2))
        result = forward.result(LIMIT_S)
        step.result(LIMIT_S)
        losses.append(result.metrics["loss:sum"])
        if len(losses) == 1:
            wanted = model_logprobs(roots / "tiny", ROWS)
            for found, row in zip(result.loss_fn_outputs, wanted, strict=True):
                assert np.allclose(found["logprobs"].to_numpy(), row, atol=1e-5)
            assert losses[0] == pytest.approx(-sum(row.sum() for row in wanted), rel=1e-5)
    assert losses[-1] < losses[0] - 1

    trained = trainer.forward(data, "cross_entropy").result(LIMIT_S)
    assert trained.metrics["loss:sum"] < losses[-1]
    sampler = trainer.save_weights_and_get_sampling_client().result(LIMIT_S)
    scores = sampler.compute_logprobs(prompt(ROWS[0])).result(LIMIT_S)
    assert scores[0] is None
    output = trained.loss_fn_outputs[0]["logprobs"].to_numpy()
    assert np.allclose(np.array(scores[1:], np.float32), output, atol=1e-4)

    saved = trainer.save_state("one").result(LIMIT_S)
    assert saved.path == f"tinker://{trainer.model_id}/weights/one"
    resumed = client.create_training_client_from_state_with_optimizer(saved.path).result(LIMIT_S)
    again = resumed.forward(data, "cross_entropy").result(LIMIT_S)
    assert again.metrics["loss:sum"] == pytest.approx(trained.metrics["loss:sum"], rel=1e-6)
    fresh = client.create_lora_training_client(base_model="tiny", rank=8, seed=2).result(LIMIT_S)
    with pytest.warns(FutureWarning, match="load_state"):
        fresh.load_state(saved.path).result(LIMIT_S)
    loaded = fresh.forward(data, "cross_entropy").result(LIMIT_S)
    assert loaded.metrics["loss:sum"] == pytest.approx(trained.metrics["loss:sum"], rel=1e-6)


def torch_loss(name: str, settings: dict[str, float], new: Any, old: Any, advantage: Any) -> Any:
    """The losses of the Tinker API for one row, as its documentation writes them."""
    low, high = settings.get("clip_low_threshold", 0.0), settings.get("clip_high_threshold", 0.0)
    ratio = (new - old).exp()
    if name == "gspo":
        ratio = (new - old).mean().exp()
    match name:
        case "cross_entropy":
            return -(advantage * new).sum()
        case "importance_sampling":
            return -(ratio * advantage).sum()
        case "ppo" | "gspo":
            return -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage).sum()
        case "cispo":
            return -(ratio.clamp(low, high).detach() * advantage * new).sum()
    return -(new * advantage - 0.5 * settings["beta"] * (new - old) ** 2).sum()


def test_gradients_of_each_loss_and_steps_with_all_parameters_are_those_of_plain_torch(
    client: tinker.ServiceClient, cluster: EmbeddedCluster, roots: Path
) -> None:
    trainer = client.create_lora_training_client(base_model="tiny", rank=0).result(LIMIT_S)
    assert trainer.get_info().is_lora is False
    model: Any = AutoModelForCausalLM.from_pretrained(roots / "tiny", dtype=torch.float32)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=0.05, betas=(0.9, 0.95), eps=1.0, weight_decay=0.1
    )
    rng = np.random.default_rng(0)
    for name, settings in LOSSES.items():
        data, total = [], torch.zeros(())
        for row in ROWS:
            logits = model(input_ids=torch.tensor([row[:-1]])).logits[0].log_softmax(-1)
            new = logits[range(len(row) - 1), row[1:]]
            old = new.detach() + torch.tensor(rng.normal(0, 0.1, len(row) - 1)).float()
            advantage = torch.tensor(rng.normal(0, 1, len(row) - 1)).float()
            total = total + torch_loss(name, settings, new, old, advantage)
            inputs: dict[str, Any] = {"weights": advantage.tolist()}
            if name != "cross_entropy":
                inputs = {"logprobs": old.tolist(), "advantages": advantage.tolist()}
            data.append(datum(row, **inputs))
        optimizer.zero_grad()
        total.backward()  # type: ignore[no-untyped-call]
        norm = float(torch.nn.utils.get_total_norm(each.grad for each in model.parameters()))
        optimizer.step()
        loss = trainer.forward_backward(data, name, settings)  # type: ignore[arg-type]
        step = trainer.optim_step(STEP).result(LIMIT_S)
        assert loss.result(LIMIT_S).metrics["loss:sum"] == pytest.approx(
            float(total.detach()), rel=1e-4, abs=1e-4
        )
        assert step.metrics is not None
        assert step.metrics["grad_norm:mean"] == pytest.approx(norm, rel=1e-4), name

    path = trainer.save_state("all").result(LIMIT_S).path
    job = path.removeprefix("tinker://").partition(":")[0]
    [saved] = (cluster.data_dir / "checkpoints" / job).glob("*.weights.all/model.safetensors")
    weights = load_file(saved)
    for parameter, value in model.state_dict().items():
        if parameter in weights:
            assert torch.allclose(weights[parameter], value, atol=2e-5), parameter
