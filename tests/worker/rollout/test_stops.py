"""Rows end at texts where `transformers` ends them, and at the end tokens that it uses."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plexrl.errors import InvalidRequestError
from plexrl.model.deployment_spec import DeploymentSpec
from plexrl.model.spec import ModelSpec, tiny_qwen2
from plexrl.wire.operations import SamplingParams
from plexrl.worker.models import build_model
from plexrl.worker.rollout.engine import Generation, TorchRolloutBackend
from plexrl.worker.rollout.stops import TextDecoder, is_at_stop
from tests.examples import examples
from tests.model.text.test_tokenizer import BYTE_LEVEL, directory, theirs

PROMPTS = [[40, 41, 42], [100], [7, 200, 9, 290]]
SIZES = {
    **tiny_qwen2("ab").config,
    "vocab_size": BYTE_LEVEL._tokenizer.get_vocab_size(),
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
}


def model(folder: Path, generation: dict[str, Any] | None = None) -> ModelSpec:
    """A model's directory with a byte-level tokenizer."""
    path = directory(folder / "m")
    made: Any = build_model(ModelSpec(architecture="qwen2", config_json=json.dumps(SIZES), seed=3))
    generator = torch.Generator().manual_seed(7)
    for parameter in made.parameters():
        # With its first weights a model repeats one token.
        parameter.data.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    made.save_pretrained(path)
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return ModelSpec(path=str(path))


def generate(spec: ModelSpec, folder: Path, **sampling: Any) -> Generation:
    deployment = DeploymentSpec(
        model=spec,
        kind="rollout",
        backend="torch",
        workers=1,
        max_sequence_tokens=64,
        max_concurrent_samples=8,
    )
    backend = TorchRolloutBackend(deployment, folder)
    backend.lay_out()
    backend.materialise()
    made = Generation(
        name="g",
        prompts=PROMPTS,
        samples_per_prompt=1,
        sampling=SamplingParams(**{"temperature": 0.0, "max_tokens": 30, "seed": 1, **sampling}),
        emit=None,
        weights_seq=0,
    )
    backend.engine.submit(made)
    while backend.engine.has_work:
        backend.engine.step()
    return made


def test_a_text_ends_a_row_where_it_ends_it_in_transformers(tmp_path: Path) -> None:
    spec = model(tmp_path)
    free = generate(spec, tmp_path, ignore_eos=True)
    tokenizer, other = theirs(Path(str(spec.path))), build_model(spec)
    for row, drawn in enumerate(free.tokens):
        text = BYTE_LEVEL.decode(drawn.tolist(), skip_special_tokens=False)
        # Inside a token, over borders of tokens, in the middle of a row.
        for stop in {text[5:6], text[6:9], text[9:17], text[1:3]} - {""}:
            before = BYTE_LEVEL.decode(PROMPTS[row], skip_special_tokens=False)
            # `transformers` also ends a row at a text that begins in the prompt.
            is_begun = (before + text).find(stop) < len(before)
            if "\N{REPLACEMENT CHARACTER}" in stop or is_begun:
                continue
            found = generate(spec, tmp_path, ignore_eos=True, stop_strings=(stop, "never drawn"))
            prompt = torch.tensor([PROMPTS[row]])
            wanted = other.generate(  # type: ignore[operator]
                prompt,
                max_new_tokens=30,
                do_sample=False,
                eos_token_id=None,
                stop_strings=[stop],
                tokenizer=tokenizer,
            )
            assert found.tokens[row].tolist() == wanted[0, len(PROMPTS[row]) :].tolist(), stop


@pytest.mark.parametrize("ends", [[9], "drawn", None])
def test_end_tokens_of_the_generations_configuration_end_rows(
    tmp_path: Path, ends: list[int] | str | None
) -> None:
    free = generate(model(tmp_path / "free"), tmp_path, ignore_eos=True)
    if ends == "drawn":
        ends = [int(free.tokens[0][4]), int(free.tokens[1][2])]
    spec = model(tmp_path, None if ends is None else {"eos_token_id": ends})
    found = generate(spec, tmp_path)
    for row, tokens in enumerate(found.tokens):
        wanted = build_model(spec).generate(  # type: ignore[operator]
            torch.tensor([PROMPTS[row]]), max_new_tokens=30, do_sample=False
        )
        assert tokens.tolist() == wanted[0, len(PROMPTS[row]) :].tolist()
    assert isinstance(ends, list) != (found.finish == free.finish) or ends == [9]


def test_a_text_needs_a_tokenizer(tmp_path: Path) -> None:
    spec = ModelSpec(architecture="qwen2", config_json=json.dumps(SIZES))
    with pytest.raises(InvalidRequestError, match="the model has no tokenizer"):
        generate(spec, tmp_path, stop_strings=("x",))


@given(tokens=st.lists(st.integers(6, 290), max_size=40), data=st.data())
@settings(max_examples=examples(60), deadline=None)
def test_a_row_ends_with_the_first_token_that_completes_a_text(
    tokens: list[int], data: st.DataObject
) -> None:
    text = BYTE_LEVEL.decode(tokens, skip_special_tokens=False)
    first = data.draw(st.integers(0, len(text)))
    stops = [text[first : first + data.draw(st.integers(1, 6))], "zz"]
    chosen = tuple(stop for stop in stops if stop and "\N{REPLACEMENT CHARACTER}" not in stop)
    sampling = SamplingParams(stop_strings=chosen)

    def decode(some: Any) -> str:
        return BYTE_LEVEL.decode(some, skip_special_tokens=False)

    ends = [is_at_stop(tokens[:count], sampling, decode) for count in range(1, len(tokens) + 1)]
    wanted = [
        any(stop in decode(tokens[:count]) for stop in chosen)
        for count in range(1, len(tokens) + 1)
    ]
    found = ends.index(True) if True in ends else None
    assert found == (wanted.index(True) if True in wanted else None)


def test_a_vocabulary_is_a_tokenizer_too() -> None:
    text = TextDecoder(tiny_qwen2("abc"))
    text.prepare()
    assert text([3, 4, 2]) == "ab<eos>"
