"""A critic's checkpoint has all that a language model with tied embeddings needs, and is none."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from plexrl.errors import BatchShapeError
from plexrl.wire.operations import CheckpointParams, OperationKind
from plexrl.worker.interface.backend import BackendCall
from plexrl.worker.process.backend_factory import make_backend
from plexrl.worker.state.arena_tensors import view
from tests.worker.training.cases import WRITER


def test_a_trainer_refuses_the_checkpoint_of_a_critic_and_keeps_its_state(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        trainer = make_backend(WRITER.spec, 0, 1, tmp_path)
        trainer.lay_out()
        trainer.materialise()
        own = {
            each.key.name: view(trainer.arena, each).clone()
            for each in trainer.slices()
            if each.key.part == "parameter"
        }
        assert "lm_head.weight" not in own, "its embeddings are not tied"
        (tmp_path / "j" / "critic").mkdir(parents=True)
        critic = {name: torch.zeros_like(each) for name, each in own.items()}
        critic["score.weight"] = torch.ones(1, 8)
        save_file(critic, tmp_path / "j" / "critic" / "model.safetensors")
        call = BackendCall(
            operation="o",
            kind=OperationKind.LOAD_CHECKPOINT,
            params=CheckpointParams(name="critic"),
            arrays={},
            seq=1,
            job="j",
        )
        with pytest.raises(BatchShapeError, match="critic or a reward model"):
            trainer.run(call)
        for piece in trainer.slices():
            if piece.key.part == "parameter":
                assert torch.equal(view(trainer.arena, piece), own[piece.key.name])
    finally:
        dist.destroy_process_group()
