"""Pausing, interrupting and replacing the weights while samples run."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from plexrl.model.deployment_spec import DeploymentSpec
from plexrl.model.spec import tiny_qwen2
from plexrl.wire.operations import GenerateParams, OperationKind, SamplingParams
from plexrl.worker.interface.backend import BackendCall
from plexrl.worker.models import build_model, named_parameters
from plexrl.worker.rollout.engine import Engine, Generation, TorchRolloutBackend, WeightSpan
from plexrl.worker.state.arena_tensors import view
from tests.worker.arena_memory import memory_of

SPEC = tiny_qwen2("0123456789abcdefghi", seed=2)
OLD = build_model(SPEC)
NEW = build_model(tiny_qwen2("0123456789abcdefghi", seed=5))
PROMPTS = [[3, 4, 5, 6, 7, 8], [9], [10, 11, 12, 13]]


def generation(name: str = "g", *, weights_seq: int = 4, **sampling: Any) -> Generation:
    params = SamplingParams(**{"ignore_eos": True, "seed": 1, "max_tokens": 12, **sampling})
    return Generation(
        name=name,
        prompts=PROMPTS,
        samples_per_prompt=2,
        sampling=params,
        emit=None,
        weights_seq=weights_seq,
    )


def engine_on(model: torch.nn.Module) -> Engine:
    return Engine(model, slots=8, sequence_tokens_max=40, block_tokens=4)


def replace(model: torch.nn.Module) -> None:
    """New weights into the tensors that the engine reads, as a pull does."""
    with torch.no_grad():
        for home, source in zip(model.parameters(), NEW.parameters(), strict=True):
            home.copy_(source)


def logprobs_by(model: Any, prompt: list[int], tokens: list[int]) -> Any:
    row = torch.tensor([[*prompt, *tokens]])
    with torch.no_grad():
        whole = model(input_ids=row).logits.log_softmax(-1)[0, :-1]
    return whole.gather(-1, row[0, 1:, None])[len(prompt) - 1 :, 0].numpy()


def finish(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def test_after_an_update_logprobs_are_those_of_a_fresh_model() -> None:
    model = copy.deepcopy(OLD)
    engine = engine_on(model)
    made = generation()
    engine.submit(made)
    for _ in range(5):
        engine.step()
    replace(model)
    engine.weights_changed(5)
    finish(engine)
    later = generation("later", weights_seq=5)
    engine.submit(later)
    finish(engine)
    for row, (tokens, logprobs) in enumerate(zip(made.tokens, made.logprobs, strict=True)):
        prompt = PROMPTS[row // 2]
        before, after = (logprobs_by(model, prompt, tokens.tolist()) for model in (OLD, NEW))
        assert np.allclose(logprobs[:5], before[:5], atol=1e-4)
        assert np.allclose(logprobs[5:], after[5:], atol=1e-4)
        assert not np.allclose(logprobs[5:], before[5:], atol=1e-2)
        assert made.segments[row] == [
            WeightSpan(start=0, weights_seq=4),
            WeightSpan(start=5, weights_seq=5),
        ]
        whole = logprobs_by(NEW, prompt, later.tokens[row].tolist())
        assert np.allclose(later.logprobs[row], whole, atol=1e-4)
        assert later.segments[row] == [WeightSpan(start=0, weights_seq=5)]
    assert engine.stats().tokens_recomputed > 0


def test_only_running_samples_use_a_kept_cache() -> None:
    model = copy.deepcopy(OLD)
    engine = engine_on(model)
    made = generation()
    engine.submit(made)
    for _ in range(5):
        engine.step()
    before = engine.stats().tokens_computed
    replace(model)
    engine.weights_changed(5, recompute_kv=False)
    engine.step()
    assert engine.stats().tokens_computed - before == 6, "one token for each sample, no more"
    later = generation("later")
    engine.submit(later)
    finish(engine)
    again = generation("again")
    engine.submit(again)
    finish(engine)
    for row in range(6):
        assert [segment.weights_seq for segment in made.segments[row]] == [4, 5]
        prompt = PROMPTS[row // 2]
        fresh = logprobs_by(NEW, prompt, made.tokens[row].tolist())
        assert not np.allclose(made.logprobs[row][5:], fresh[5:], atol=1e-3)
        for found in (later, again):
            whole = logprobs_by(NEW, prompt, found.tokens[row].tolist())
            assert np.allclose(found.logprobs[row], whole, atol=1e-4)


def test_a_paused_engine_draws_nothing_and_continues_after_resume() -> None:
    undisturbed = generation()
    engine = engine_on(OLD)
    engine.submit(undisturbed)
    finish(engine)
    made = generation()
    engine.submit(made)
    engine.step()
    engine.pause()
    assert not engine.has_work
    drawn = engine.stats().tokens_drawn
    assert engine.step() == []
    assert engine.stats().tokens_drawn == drawn
    assert engine.stats().paused
    engine.resume()
    finish(engine)
    assert [t.tolist() for t in made.tokens] == [t.tolist() for t in undisturbed.tokens]


def test_an_interrupt_takes_out_what_there_is_and_leaves_the_others() -> None:
    engine = engine_on(OLD)
    alone, made, other = generation(), generation("made"), generation("other", seed=3)
    engine.submit(alone)
    finish(engine)
    engine.submit(made)
    engine.submit(other)
    for _ in range(4):
        engine.step()
    assert engine.interrupt("made") is made
    assert engine.interrupt("made") is None
    assert made.finish == [2] * 6
    assert [t.tolist() for t in made.tokens] == [t.tolist()[:4] for t in alone.tokens]
    ended = []
    while engine.has_work:
        ended += engine.step()
        engine.check_invariants()
    assert ended == [other]
    assert other.finish == [1] * 6


def test_an_abort_while_paused_is_handed_over() -> None:
    engine = engine_on(OLD)
    made = generation()
    engine.submit(made)
    engine.step()
    engine.pause()
    engine.abort("g")
    assert engine.has_work
    assert engine.step() == [made]
    assert not engine.has_work


def backend_at(path: Path) -> TorchRolloutBackend:
    spec = DeploymentSpec(
        model=SPEC, kind="rollout", backend="torch", workers=1, max_sequence_tokens=40
    )
    backend = TorchRolloutBackend(spec, path)
    backend.lay_out()
    backend.materialise()
    return backend


def call(seq: int) -> BackendCall:
    return BackendCall(
        operation="op",
        kind=OperationKind.GENERATE,
        params=GenerateParams(
            samples_per_prompt=2,
            sampling=SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, seed=1),
        ),
        arrays={
            "tokens": np.concatenate([np.array(prompt) for prompt in PROMPTS]),
            "lengths": np.array([len(prompt) for prompt in PROMPTS]),
        },
        seq=seq,
        trainer_step=2,
    )


@pytest.mark.parametrize("recompute_kv", [True, False])
def test_a_backend_pulls_into_its_arena_between_two_tokens(
    tmp_path: Path, recompute_kv: bool
) -> None:
    backend = backend_at(tmp_path)
    backend.submit(call(7), None)
    backend.step()
    backend.step()
    backend.pause(recompute_kv=recompute_kv)
    assert not backend.has_work
    new = dict(named_parameters(NEW))
    for piece in backend.slices():
        view(backend.arena, piece).copy_(new[piece.key.name].data)
    backend.after_pull(seq=8, trainer_step=3)
    backend.resume()
    finished: list[Any] = []
    while backend.has_work:
        finished += backend.step()
    ((name, found),) = finished
    assert name == "op"
    assert (found.result["weights_seq"], found.result["trainer_step"]) == (7, 2)
    assert found.result["segments"] == [
        part for row in range(6) for part in ([row, 0, 7, 2], [row, 2, 8, 3])
    ]
    tokens = np.split(found.arrays["tokens"], 6)
    logprobs = np.split(found.arrays["logprobs"], 6)
    for row in range(6):
        fresh = logprobs_by(NEW, PROMPTS[row // 2], tokens[row].tolist())
        assert np.allclose(logprobs[row][2:], fresh[2:], atol=1e-4) == recompute_kv


def test_a_paused_backend_can_be_offloaded_and_a_running_one_interrupted(tmp_path: Path) -> None:
    backend = backend_at(tmp_path)
    backend.submit(call(0), None)
    for _ in range(3):
        backend.step()
    backend.pause()
    kept = bytes(memory_of(backend.arena))
    backend.before_offload()
    assert backend.stats().blocks_held == 0
    memory_of(backend.arena)[:] = kept
    backend.after_load(backend.live_parts())
    backend.resume()
    backend.step()
    found = backend.interrupt("op")
    assert found is not None
    assert found.arrays["lengths"].tolist() == [4] * 6
    assert "segments" not in found.result
    assert backend.interrupt("op") is None
    assert not backend.has_work
    for row, tokens in enumerate(np.split(found.arrays["tokens"], 6)):
        prompt = torch.tensor([PROMPTS[row // 2]])
        wanted = OLD.generate(  # type: ignore[operator]
            prompt, max_new_tokens=4, do_sample=False, eos_token_id=None
        )
        assert tokens.tolist() == wanted[0, prompt.shape[1] :].tolist()
