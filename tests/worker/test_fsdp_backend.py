"""The FSDP backend on real gloo ranks, against plain torch in one process."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp

from plexrl.statemanager.config import StateManagerConfig
from plexrl.worker.losses import compute_loss
from plexrl.worker.models import build_model, named_parameters
from plexrl.worker.packing import micro_batches
from tests.statemanager.conftest import Daemon
from tests.worker import fsdp_ranks as ranks


@pytest.fixture(scope="module", params=[1, 2])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which a world of 1 or 2 ranks has trained; `world<n>.pt` is the outcome."""
    folder = tmp_path_factory.mktemp(f"world{request.param}")
    daemon = Daemon(
        StateManagerConfig(
            node="n",
            listen=str(folder / "sm.sock"),
            host_dir=tempfile.mkdtemp(prefix="plexrl-test-", dir="/dev/shm"),
            host_bytes=256 << 20,
            nvme_dir=str(folder / "nvme"),
            nvme_bytes=256 << 20,
            checkpoint_dir=str(folder),
        )
    )
    daemon.start()
    mp.spawn(  # type: ignore[no-untyped-call, attr-defined]
        ranks.train,
        args=(request.param, str(folder / "store"), str(folder), daemon.config.listen),
        nprocs=request.param,
    )
    # A clean exit finishes the checkpoint.
    daemon.terminate()
    daemon.clean_up()
    return folder


def outcome(folder: Path) -> dict[str, object]:
    (file,) = folder.glob("world*.pt")
    found: dict[str, object] = torch.load(file)
    return found


@pytest.fixture(scope="module")
def reference() -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same training without FSDP, arenas or ranks."""
    model = build_model(ranks.MODEL)
    parameters = dict(named_parameters(model))
    optimizer = torch.optim.AdamW(
        parameters.values(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0
    )
    norms = []
    for index in range(ranks.STEPS):
        for arrays in (ranks.batch(index), ranks.batch(100 + index, rows=1)):
            (batch,) = micro_batches(arrays, 1)
            logits = model(input_ids=batch.tokens_BL, attention_mask=batch.valid_BL.long()).logits
            logprobs = logits[:, :-1].log_softmax(-1).gather(-1, batch.tokens_BL[:, 1:, None])
            padded = torch.nn.functional.pad(logprobs[..., 0] * batch.valid_BL[:, 1:], (1, 0))
            rows = float(len(arrays["lengths"]))
            compute_loss(ranks.LOSS, padded, batch.per_token_BL, rows).loss.backward()  # type: ignore[no-untyped-call]
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    return norms, {name: p.detach() for name, p in parameters.items()}


def test_training_equals_plain_torch(
    trained: Path, reference: tuple[list[float], dict[str, torch.Tensor]]
) -> None:
    found = outcome(trained)
    norms, parameters = reference
    assert np.allclose(found["norms"], norms, rtol=1e-4)  # type: ignore[arg-type]
    for name, wanted in parameters.items():
        assert torch.allclose(found["parameters"][name], wanted, atol=2e-4), name  # type: ignore[index]


def test_a_checkpoint_loads_into_another_number_of_ranks(trained: Path) -> None:
    (file,) = trained.glob("world*.pt")
    other = 2 if file.stem == "world1" else 1
    mp.spawn(  # type: ignore[no-untyped-call, attr-defined]
        ranks.resume,
        args=(other, str(trained / "store2"), str(trained), file.stem),
        nprocs=other,
    )
    assert file.exists()


def test_transformers_loads_a_checkpoint_as_it_is(trained: Path) -> None:
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    (file,) = trained.glob("world*.pt")
    path = trained / "j" / file.stem
    model = AutoModelForCausalLM.from_pretrained(path)
    wanted = torch.load(file)["parameters"]
    assert all(torch.equal(p, wanted[name]) for name, p in model.named_parameters())
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode("0a9"), skip_special_tokens=True) == "0a9"
