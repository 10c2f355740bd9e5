"""Model directories written by `transformers` are loaded, and saved ones load there."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import plexrl
from plexrl.model.text.tokenizer import char_tokenizer_json
from plexrl.worker.models import build_model
from tests.cluster.tools import VOCABULARY, some_batch

ROWS = [[3, 4, 5, 6, 7, 8], [9, 10], [3, 3, 3]]
OTHER_FILES = {
    "tokenizer_config.json": '{"tokenizer_class": "PreTrainedTokenizerFast"}',
    "special_tokens_map.json": '{"eos_token": "<eos>"}',
    "chat_template.jinja": "{{ messages[0] }}",
    "added_tokens.json": "{}",
}


def directory(folder: Path, *, tied: bool = True, dtype: torch.dtype = torch.float32) -> Path:
    """A model in several shards with a tokenizer, as on the Hugging Face hub."""
    spec = plexrl.tiny_qwen2(VOCABULARY, seed=4, hidden=32)
    config = spec.config | {"tie_word_embeddings": tied}
    model: Any = build_model(
        plexrl.ModelSpec(architecture="qwen2", config_json=json.dumps(config), seed=4)
    )
    model.to(dtype).save_pretrained(folder, max_shard_size="40KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    (folder / "tokenizer.json").write_text(char_tokenizer_json(VOCABULARY))
    for name, text in OTHER_FILES.items():
        (folder / name).write_text(text)
    return folder


def logprobs(folder: Path) -> list[np.ndarray]:
    """Logprobs computed by `transformers`."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = []
    for row in ROWS:
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([row])).logits[0].log_softmax(-1)
        found.append(logits[range(len(row) - 1), row[1:]].numpy())
    return found


def assert_logprobs(model: Any, wanted: list[np.ndarray], atol: float = 1e-5) -> None:
    found = model.forward(plexrl.Batch(ROWS)).result(120).logprobs
    for row, expected in zip(found, wanted, strict=True):
        assert np.allclose(row[1:], expected, atol=atol)


@pytest.mark.parametrize(
    ("tied", "dtype"), [(True, torch.float32), (False, torch.bfloat16)], ids=["tied", "bfloat16"]
)
def test_a_sharded_directory_is_loaded_by_every_kind_and_saved_again(
    job: plexrl.Job, tmp_path: Path, tied: bool, dtype: torch.dtype
) -> None:
    folder = directory(tmp_path / "model", tied=tied, dtype=dtype)
    model = plexrl.ModelSpec(path=str(folder))
    wanted = logprobs(folder)
    actor = job.train_deployment("actor", model, workers=2)
    assert_logprobs(actor, wanted)
    assert_logprobs(job.reference_deployment("reference", model), wanted)
    rollout = job.rollout_deployment("rollout", model)
    sampling = plexrl.SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    [[sample]] = rollout.generate([ROWS[0]], sampling=sampling).result(120).samples
    spoken = actor.forward(plexrl.Batch([[*ROWS[0], *sample.tokens]])).result(120).logprobs[0]
    assert np.allclose(spoken[len(ROWS[0]) :], sample.logprobs, atol=1e-4)

    actor.forward_backward(some_batch(1), plexrl.losses.grpo())
    actor.optim_step(learning_rate=1e-2).result(120)
    saved = Path(actor.save_checkpoint("saved", shard_bytes_max=40_000).result(120)["path"])
    assert len(list(saved.glob("model-*.safetensors"))) > 1
    trained = [row[1:] for row in actor.forward(plexrl.Batch(ROWS)).result(120).logprobs]
    assert not np.allclose(trained[0], wanted[0], atol=1e-3)
    for found, expected in zip(logprobs(saved), trained, strict=True):
        assert np.allclose(found, expected, atol=1e-5)
    for name in ("tokenizer.json", *OTHER_FILES):
        assert (saved / name).read_bytes() == (folder / name).read_bytes(), name
    assert AutoTokenizer.from_pretrained(saved).encode("12") == actor.tokenizer().encode("12")
    # The saved directory can be loaded again.
    assert_logprobs(job.reference_deployment("again", plexrl.ModelSpec(path=str(saved))), trained)
