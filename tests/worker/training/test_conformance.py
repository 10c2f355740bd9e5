"""Every training backend under every layout does what plain torch does in one process."""

import functools
import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from plexrl.errors import NonFiniteGradientError, from_wire
from plexrl.router.dispatch.reductions import gather_metrics
from plexrl.statemanager.layout.keys import StatePart
from plexrl.wire.tensors import Array, Arrays
from plexrl.worker.batches.packing import unpack
from plexrl.worker.models import build_model, named_parameters
from plexrl.worker.models.build import automatic_class
from tests.statemanager.conftest import daemon_in
from tests.worker.training import reference
from tests.worker.training.cases import CASES, WRITER, WRITERS, Case
from tests.worker.training.compiling import COMPILING
from tests.worker.training.ranks import (
    ADAM,
    TOP,
    Kept,
    Step,
    assembled,
    batch,
    batches,
    inputs_of,
    launch,
    loss_of,
    plan_of,
)

if TYPE_CHECKING:
    from pathlib import Path

Records = list[dict[str, Any]]
"""By rank."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Case], Records]]:
    """Runs a case when it is first requested."""
    folder = tmp_path_factory.mktemp("conformance")
    daemon = daemon_in(folder, 256 << 20)

    failures: dict[str, BaseException] = {}

    @functools.cache
    def run(case: Case) -> Records:
        if case.name in failures:
            raise failures[case.name]
        try:
            return run_once(case)
        except Exception as error:
            # Every test of the case says the same, and none runs it again.
            failures[case.name] = error
            raise

    def run_once(case: Case) -> Records:
        writer = WRITERS.get(case.model, WRITER)
        if case.name != writer.name:
            run(writer)
        own = folder / "ranks" / case.name
        own.mkdir(parents=True)
        launch(case, own, daemon.config.listen)
        found = range(case.layout.world_size)
        records = [torch.load(own / f"{rank}.pt", weights_only=False) for rank in found]
        for record in records:
            record["checkpoint"] = folder / "j" / case.name
        return records

    yield run
    daemon.clean_up()


def marks_of(case: Case) -> tuple[pytest.MarkDecorator, ...]:
    if case.compiles:
        return COMPILING
    return (pytest.mark.slow,) if case.is_slow else ()


@pytest.fixture(params=[pytest.param(case, id=case.name, marks=marks_of(case)) for case in CASES])
def case(request: pytest.FixtureRequest) -> Case:
    found = request.param
    assert isinstance(found, Case)
    return found


@pytest.fixture
def records(case: Case, results: Callable[[Case], Records]) -> Records:
    return results(case)


def test_the_model_begins_with_the_same_bits_as_transformers_gives_it(
    case: Case, records: Records
) -> None:
    found = whole(records, 0, "before", StatePart.PARAMETER)
    wanted = dict(named_parameters(build_model(case.model)))
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("step", [0, 1])
def test_outputs_losses_and_accumulated_gradients_are_those_of_plain_torch(
    case: Case, records: Records, step: int
) -> None:
    parameters = whole(records, step, "before", StatePart.PARAMETER)
    first, second = batches(step)
    arrays_of_calls = inputs_of(case, first), inputs_of(case, second)
    outputs, losses, gradients = reference.gradients_of(
        case.model, parameters, arrays_of_calls, loss_of(case), case.spec.compute_dtype
    )
    steps = [record["steps"][step] for record in records]
    for index, arrays in enumerate(arrays_of_calls):
        near(joined(case, arrays, [s.outputs[index] for s in steps]), outputs[index], case)
        counted = [{"sums": steps[rank].sums[index]} for rank in case.layout.output_ranks]
        loss = gather_metrics(counted)["metrics"]["loss"]
        assert loss == pytest.approx(losses[index], rel=10 * case.tolerance, abs=case.tolerance)
    found = whole(records, step, "gradients", StatePart.GRADIENT)
    assert set(found) == set(gradients)
    for name, wanted in gradients.items():
        error = float((found[name] - wanted).abs().max())
        assert error <= case.tolerance * max(float(wanted.abs().max()), 1e-3), name


@pytest.mark.parametrize("step", [0, 1])
def test_a_step_is_adamw_by_clipped_gradients(records: Records, step: int) -> None:
    before = whole(records, step, "before", StatePart.PARAMETER)
    state = whole(records, step, "before", StatePart.OPTIMIZER)
    gradients = whole(records, step, "gradients", StatePart.GRADIENT)
    norm = reference.global_norm(gradients)
    assert norm > ADAM.grad_clip_norm, "nothing would be clipped"
    for record in records:
        assert record["steps"][step].metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
    wanted = reference.adamw(before, gradients, state, ADAM)
    found = whole(records, step, "after", StatePart.PARAMETER)
    found |= whole(records, step, "after", StatePart.OPTIMIZER)
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        assert torch.allclose(found[name], value, rtol=1e-5, atol=1e-6), name
    assert float(found["step"]) == step + 1


def test_forward_gives_logprobs_or_values_in_the_order_of_the_batch(
    case: Case, records: Records
) -> None:
    parameters = whole(records, 1, "after", StatePart.PARAMETER)
    dtype = case.spec.compute_dtype
    reference.set_parameters(case.model, parameters, dtype)
    with torch.no_grad():
        _, wanted = reference.outputs_of(case.model, batch(99), dtype)
    found = joined(case, batch(99), [record["forward"][case.output] for record in records])
    near(found, wanted, case)


def test_forward_gives_the_entropy_and_the_likeliest_tokens_of_each_place(
    case: Case, records: Records
) -> None:
    if case.is_critic:
        # It predicts no tokens, so it gives only values.
        assert all(set(record["forward"]) == {"values"} for record in records)
        return
    parameters = whole(records, 1, "after", StatePart.PARAMETER)
    dtype = case.spec.compute_dtype
    reference.set_parameters(case.model, parameters, dtype)
    arrays = batch(99)
    with torch.no_grad():
        rows, all_BPV = reference.distributions_of(case.model, arrays, dtype)
    values = {}
    for name in ("entropy", "top_ids", "top_logprobs"):
        # Ranks without outputs return none.
        some = records[case.layout.output_ranks[0]]["forward"][name]
        own = [record["forward"].get(name, some) for record in records]
        values[name] = joined(case, arrays, own)
    count = len(arrays["tokens"])
    # Predicted tokens; the others are 0.
    real_BL = rows.valid_BL.clone()
    real_BL[:, 0] = False
    wanted = unpack([rows], [reference.entropy_of(all_BPV) * real_BL], count)
    near(values["entropy"], wanted, case)
    all_BLV = torch.nn.functional.pad(all_BPV, (0, 0, 1, 0)) * real_BL[..., None]
    near(
        values["top_logprobs"],
        unpack([rows], [all_BLV.topk(TOP).values * real_BL[..., None]], count),
        case,
    )
    # Rounding may exchange two tokens that are about as likely.
    places = torch.from_numpy(values["top_ids"].astype(np.int64))
    flat = torch.from_numpy(unpack([rows], [all_BLV], count))
    near(flat.gather(-1, places).numpy(), values["top_logprobs"], case)
    assert values["top_ids"].dtype == np.int32


def test_a_model_that_computes_in_bf16_rounds_and_one_in_float32_does_not(
    case: Case, records: Records
) -> None:
    parameters = whole(records, 1, "after", StatePart.PARAMETER)
    reference.set_parameters(case.model, parameters)
    with torch.no_grad():
        _, wanted = reference.outputs_of(case.model, batch(99))
    found = joined(case, batch(99), [record["forward"][case.output] for record in records])
    rounds = float(np.abs(found - wanted).max()) > 1e-4
    assert rounds == (case.spec.compute_dtype == "bfloat16")


def test_gradients_that_are_not_finite_are_dropped_with_a_typed_error(records: Records) -> None:
    for record in records:
        for refusal in record["refusals"]:
            assert isinstance(from_wire(refusal), NonFiniteGradientError)


def test_weights_that_are_not_finite_are_found_on_every_rank_alike(
    records: Records,
) -> None:
    names = set(whole(records, 1, "after", StatePart.PARAMETER))
    for record in records:
        for error in record["spoilt"]:
            assert error == records[0]["spoilt"][0]
        assert record["spoilt"][0]["details"]["parameter"] in names


def test_transformers_loads_the_checkpoint_as_it_is(case: Case, records: Records) -> None:
    from transformers import PreTrainedTokenizerFast

    path: Path = records[0]["checkpoint"]
    assert json.loads((path / "config.json").read_text()) == json.loads(records[0]["config"])
    # A critic's is that of a reward model.
    model = automatic_class(case.model).from_pretrained(path)
    wanted = whole(records, 1, "after", StatePart.PARAMETER)
    found = dict(named_parameters(model))
    assert set(found) == set(wanted)
    assert all(torch.equal(value, wanted[name]) for name, value in found.items())
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode("0a9"), skip_special_tokens=True) == "0a9"


def test_a_checkpoint_of_another_backend_and_layout_loads_bit_for_bit(
    case: Case, records: Records, results: Callable[[Case], Records]
) -> None:
    writer = WRITERS.get(case.model)
    written = records if writer is None else results(writer)
    key = "fresh" if writer is None else "loaded"
    for part in (StatePart.PARAMETER, StatePart.OPTIMIZER):
        if key == "fresh" and part == StatePart.OPTIMIZER:
            continue
        wanted = whole(written, 1, "after", part)
        found = assembled([record[key] for record in records], part)
        assert set(found) == set(wanted)
        assert all(torch.equal(found[name], value) for name, value in wanted.items())


def test_without_its_optimizer_a_checkpoint_brings_parameters_only(records: Records) -> None:
    fresh: list[Kept] = [record["fresh"] for record in records]
    wanted = whole(records, 1, "after", StatePart.PARAMETER)
    found = assembled(fresh, StatePart.PARAMETER)
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    assert not any(bool(value.any()) for value in assembled(fresh, StatePart.OPTIMIZER).values())


def whole(records: Records, step: int, moment: str, part: StatePart) -> dict[str, torch.Tensor]:
    """Tensors at a moment of a step, put together from what every rank kept."""
    steps: list[Step] = [record["steps"][step] for record in records]
    return assembled([getattr(each, moment) for each in steps], part)


def joined(case: Case, arrays: Arrays, by_rank: list[Array]) -> Array:
    """Per-token results as the router gives them to a controller."""
    return plan_of(case, arrays).join(dict(enumerate(by_rank)))


def near(found: Array, wanted: Array, case: Case) -> None:
    """Within the case's tolerance."""
    assert found.shape == wanted.shape
    assert float(np.abs(found - wanted).max()) <= case.tolerance
