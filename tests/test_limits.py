"""Every numeric option is in the table of limits, and is refused by name beyond its bounds."""

import inspect
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Annotated, Any

import pytest
import typer.main
from fastapi.dependencies.utils import get_dependant
from fastapi.routing import APIRoute
from msgspec import structs
from pydantic import BaseModel, TypeAdapter, ValidationError
from typer.testing import CliRunner

import plexrl
from plexrl import losses, rewards
from plexrl.bounds import Bounds
from plexrl.cli.app import app
from plexrl.cli.terminal.help import CommandGroup
from plexrl.client.calls import requests
from plexrl.client.data.argument_checks import check_lora, check_model, checked_layout
from plexrl.client.data.decode_profile import DecodeProfile, ProfileSubject
from plexrl.client.data.demand import plain_trace
from plexrl.errors import InvalidRequestError, LayoutError
from plexrl.limits import LIMITS
from plexrl.router.http import schemas
from plexrl.router.http.routes import (
    asynchronous_rollouts,
    cluster,
    deployments,
    jobs,
    operations,
    rollouts,
    streams,
    tenants,
)
from plexrl.router.http.schemas import Limited
from plexrl.wire.operations import (
    AdamParams,
    CheckpointParams,
    ForwardBackwardParams,
    ForwardParams,
    GenerateParams,
    LossSpec,
    SamplingParams,
)
from plexrl.wire.parameter_checks import check_loss, check_parameters

OPTIONS = [(group, name) for group, options in LIMITS.items() for name in options]
NUMBER = re.compile(r"\b(int|float|SupportsFloat)\b")

GROUP_OF: dict[str, str] = {
    "BoundedRollout.batches": "rollout",
    "BoundedRollout.parts": "rollout",
    "BoundedStaleness": "rollout",
    "CheckpointFuture.pinned": "result",
    "CheckpointFuture.result": "result",
    "Cluster.configure_tenant": "tenant",
    "Cluster.create_job": "job",
    "Cluster.operations": "page",
    "Cluster.queue": "queue",
    "DecodeProfile": "profile",
    "DemandTrace": "trace",
    "Elastic": "elastic",
    "Fork": "fork",
    "Future.result": "result",
    "GenerateFuture.interrupt": "result",
    "GenerateFuture.result": "result",
    "Graded": "grading",
    "Graded.grade_stream": "grading",
    "Job.log": "metrics",
    "Job.log_samples": "samples",
    "Job.samples": "samples",
    "Job.logs": "page",
    "Job.metrics": "page",
    "Job.operations": "page",
    "Job.read_logs": "page",
    "Job.quote": "quote",
    "Job.reference_deployment": "deployment",
    "Job.reward_deployment": "deployment",
    "Job.rewind": "fork",
    "Job.rollout": "rollout deployment",
    "Job.rollout_deployment": "deployment",
    "Job.train_deployment": "deployment",
    "Judge": "grading",
    "Limits": "sandbox",
    "LoraSpec": "lora",
    "LossSpec": "loss",
    "MathGrader": "sandbox",
    "ModelSpec": "model",
    "Parallelism": "layout",
    "Progress": "progress",
    "Progress.step": "progress",
    "ReferenceDeployment.forward": "forward",
    "ReferenceDeployment.judge": "grading forward",
    "RewardDeployment.judge": "grading forward",
    "RewardDeployment.score": "forward",
    "RewardScheduler.finished": "result",
    "RewardScheduler.finished_async": "result",
    "RolloutDeployment.generate": "generate sampling",
    "RolloutDeployment.generate_stream": "generate",
    "RolloutDeployment.judge": "grading",
    "RolloutDeployment.pause": "pause",
    "RolloutDeployment.profile_decoding": "profile",
    "RolloutDeployment.switch_tp": "switch",
    "SamplingParams": "sampling",
    "Sandbox": "sandbox",
    "Sandbox.run": "sandbox",
    "Sandbox.run_async": "sandbox",
    "Sandbox.submit": "sandbox",
    "Segment": "segment",
    "TailBatching": "rollout",
    "TimeoutSettings": "sandbox",
    "TrainDeployment.forward": "forward",
    "TrainDeployment.forward_backward": "forward_backward",
    "TrainDeployment.optim_step": "optim_step",
    "TrainDeployment.save_checkpoint": "save_checkpoint",
    "connect": "connection",
    "connect_async": "connection",
    "cispo": "loss",
    "dapo": "loss",
    "decoupled_ppo": "loss",
    "dpo_weights": "preference",
    "dr_grpo": "loss",
    "dro": "loss",
    "gae": "advantages",
    "grpo": "loss",
    "gspo": "loss",
    "last_number": "answers",
    "numeric": "answers",
    "ppo": "loss",
    "importance_sampling": "loss",
    "reinforce": "loss",
    "tiny_qwen2": "model",
    "value": "loss",
}
"""The groups of what takes numbers: a function, a method, or a class whose fields they are."""
OTHER_NAMES = {
    "n": "samples_per_prompt",
    "clip": "value_clip",
    "first_samples": "first_sample",
}
RESULTS = {
    *(
        "Chunk",
        "GenerateResult",
        "RolloutBatch",
        "ProgramRun",
        "Sample",
        "SampleReward",
        "StepResult",
    ),
    *("TrainResult", "Grade", "RolloutProfile", "WeightsSpan", "ScoreResult", "SyncReport"),
    *("GradedSamples", "ForwardResult", "SavedCheckpoint", "LoadedCheckpoint", "BoundedRollout"),
}
"""What the SDK returns, never takes."""
NAMED_NUMBERS = (
    *(
        "JobRequest.run_warnings",
        "JobRequest.quote",
        "MetricsRequest.values",
        "ForkRequest.settings",
    ),
    "SampleRequest.reward",
)
"""Any numbers, by names that are checked where they are used."""
NO_OPTIONS = {
    *("Batch.__init__ tokens", "GenerateFuture samples", "numeric expected"),
    *("gae rewards", "gae values", "gae mask", "gae last_values"),
    *("Parallelism.coordinates rank", "Parallelism.rank dp", "Parallelism.rank tp"),
    *("Cluster.create_job run_warnings", "Job.log_samples rewards"),
    "Job.setting default",
    *("Parallelism.rank pp", "Parallelism.rank cp", "Tokenizer.decode tokens"),
}
"""Data, coordinates that are compared with a layout, and arguments of the SDK's own calls."""


def is_number(annotation: object) -> bool:
    """Whether a parameter takes a number, or a tuple of some; not arrays of tokens or functions."""
    text = str(annotation)
    if any(word in text for word in ("Callable", "Iterable", "Mapping", "dict", "list[")):
        return False
    if "Sequence[collections" in text or "Sequence[tuple" in text:
        return False
    return NUMBER.search(text) is not None


def sdk_numbers() -> Iterator[tuple[str, str]]:
    """Each number that a public function, method or class of the SDK takes."""
    for module in (plexrl, rewards, losses):
        for name, found in inspect.getmembers(module):
            is_error = inspect.isclass(found) and issubclass(found, BaseException)
            if name.startswith("_") or is_error or inspect.ismodule(found) or name in RESULTS:
                continue
            if inspect.isfunction(found):
                yield from _parameters(name, found)
            elif inspect.isclass(found):
                yield from _parameters(name, found)
                for method, function in inspect.getmembers(found, inspect.isfunction):
                    if not method.startswith("_"):
                        yield from _parameters(f"{name}.{method}", function)


def _parameters(owner: str, function: Callable[..., Any]) -> Iterator[tuple[str, str]]:
    for parameter in inspect.signature(function).parameters.values():
        if is_number(parameter.annotation):
            yield owner, parameter.name


def test_every_number_of_the_sdk_is_in_the_table() -> None:
    missing = []
    for owner, name in sorted(set(sdk_numbers())):
        plain = owner.removeprefix("Async")
        if f"{plain} {name}" in NO_OPTIONS or name == "deadline_s":
            continue
        groups = GROUP_OF.get(plain, "").split()
        if not any(OTHER_NAMES.get(name, name) in LIMITS[group] for group in groups):
            missing.append(f"{owner}({name}=…)")
    assert missing == []


def test_the_scan_of_the_sdk_sees_a_new_number() -> None:
    def generate(*, repetition_penalty: float | None = None) -> None:
        del repetition_penalty

    assert [*_parameters("generate", generate)] == [("generate", "repetition_penalty")]


def test_every_number_of_a_request_body_is_in_the_table() -> None:
    models = [
        found
        for module in (schemas, tenants)
        for _, found in inspect.getmembers(module, inspect.isclass)
        if issubclass(found, BaseModel) and found.__module__ == module.__name__
    ]
    missing = [
        f"{model.__name__}.{name}"
        for model in models
        for name, field in model.model_fields.items()
        if NUMBER.search(str(inspect.get_annotations(model)[name]))
        and "Limited(" not in str(inspect.get_annotations(model)[name])
        and f"{model.__name__}.{name}" not in NAMED_NUMBERS
    ]
    assert len(models) > 15
    assert missing == []


def test_every_number_of_a_query_or_path_is_in_the_table() -> None:
    subjects = (
        *(asynchronous_rollouts, cluster, deployments, jobs, operations),
        *(rollouts, streams, tenants),
    )
    seen, missing = 0, []
    for subject in subjects:
        for route in subject.ROUTES.routes:
            assert isinstance(route, APIRoute)
            found = get_dependant(path=route.path, call=route.endpoint)
            for field in (*found.query_params, *found.path_params):
                if NUMBER.search(str(field.field_info.annotation)):
                    seen += 1
                    if not any(isinstance(each, Limited) for each in field.field_info.metadata):
                        missing.append(f"{route.path} {field.name}")
    assert seen >= 8
    assert missing == []


def commands(group: Any, path: str = "plexrl") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            assert isinstance(command, CommandGroup), f"{path} {name} does not check numbers"
            yield from commands(command, f"{path} {name}")
        else:
            yield f"{path} {name}", command


def cli_numbers() -> Iterator[tuple[str, Any]]:
    for path, command in commands(typer.main.get_command(app)):
        for parameter in command.params:
            if parameter.type.name.removesuffix(" range") in ("int", "float"):
                yield path, parameter


def test_every_number_of_the_command_line_is_in_the_table() -> None:
    found = list(cli_numbers())
    missing = [
        f"{path} {each.opts[0]}" for path, each in found if each.name not in LIMITS.get(path, {})
    ]
    assert len(found) > 100
    assert missing == []


def test_ranges_that_the_help_shows_are_those_of_the_table_or_wider() -> None:
    for path, each in cli_numbers():
        bounds = LIMITS[path][each.name]
        least, most = getattr(each.type, "min", None), getattr(each.type, "max", None)
        assert least is None or least <= bounds.least, (path, each.name)
        assert most is None or most >= bounds.most, (path, each.name)


def test_defaults_of_the_command_line_are_within_the_table() -> None:
    for path, each in cli_numbers():
        assert each.default is None or LIMITS[path][each.name].holds(each.default), each.name


def test_commands_refuse_a_number_by_name_before_they_do_anything() -> None:
    result = CliRunner().invoke(app, ["logs", "--lines", "0", "job"])
    assert isinstance(result.exception, InvalidRequestError)
    assert "--lines is 0; it must be a whole number, at least 1" in result.exception.message


def edges(bounds: Bounds) -> tuple[list[Any], list[Any]]:
    """(accepted, refused) values of an option."""
    least: float
    most: float
    if bounds.is_whole:
        below, above = bounds.least - 1, bounds.most + 1
        least, most = bounds.least, bounds.most
    else:
        least, most = float(bounds.least), float(bounds.most)
        below, above = math.nextafter(least, -math.inf), math.nextafter(most, math.inf)
        if bounds.is_open:
            most, above = math.nextafter(most, -math.inf), most
    refused: list[Any] = [above, math.nan, math.inf, -math.inf, True, False, "1", b"1", [1], 1j]
    if below != 0 or not bounds.may_be_zero:
        refused.append(below)
    accepted: list[Any] = [least, most]
    (accepted if bounds.may_be_zero else []).append(0)
    (accepted if bounds.may_be_absent else refused).append(None)
    if bounds.is_whole:
        refused.append(least + 0.5)
    return accepted, refused


@pytest.mark.parametrize(("group", "name"), OPTIONS)
def test_an_option_is_accepted_up_to_its_bounds_and_refused_by_name_beyond(
    group: str, name: str
) -> None:
    accepted, refused = edges(LIMITS[group][name])
    for value in accepted:
        LIMITS[group][name].check(name, value)
    for value in refused:
        with pytest.raises(InvalidRequestError, match=f"^{name} is ") as error:
            LIMITS[group][name].check(name, value)
        assert error.value.details["parameter"] == name


MODEL = plexrl.tiny_qwen2("0123456789")
SGD = AdamParams(learning_rate=1e-6, optimizer="sgd")
SUBJECT = ProfileSubject(
    model="m", dtype="float32", device="cpu", tp_sizes=(1, 2), kv_token_bytes=4
)


def takers() -> Iterator[tuple[str, Callable[[str, Any], object]]]:
    """What takes the options of a group in the SDK, without a cluster."""

    def deployment(name: str, value: Any) -> object:
        return requests.create_deployment("job", "name", "train", MODEL, {name: value})

    yield "optim_step", lambda n, v: check_parameters(structs.replace(SGD, **{n: v}))
    yield "loss", lambda n, v: check_loss(LossSpec(name="grpo", **{n: v}))
    yield "sampling", lambda n, v: check_parameters(SamplingParams(**{n: v}))
    yield "generate", lambda n, v: check_parameters(GenerateParams(**{n: v}))
    yield "forward", lambda n, v: check_parameters(ForwardParams(**{n: v}))
    yield (
        "forward_backward",
        lambda n, v: check_parameters(
            ForwardBackwardParams(loss=plexrl.losses.cross_entropy(), **{n: v})
        ),
    )
    yield "save_checkpoint", lambda n, v: check_parameters(CheckpointParams(name="a", **{n: v}))
    yield "job", lambda n, v: requests.create_job("name", None, {n: v})
    yield "deployment", deployment
    yield "lora", lambda n, v: check_lora(plexrl.LoraSpec(**{"rank": 1, n: v}))
    yield "layout", lambda n, v: plexrl.Parallelism(**{"dp": 60 * 61, n: v})
    yield "trace", lambda n, v: plain_trace({"period_s": 1.0, n: v})
    yield "segment", lambda n, v: plain_trace({"segments": [{n: v}]})
    yield "elastic", lambda n, v: plexrl.Elastic(**{"min": 1, "max": 4096, n: v})
    yield "pause", lambda _, v: requests.pause("job/name", v)
    yield "switch", lambda _, v: requests.switch_tp("job/name", v, "migrate")
    yield "deadline", lambda _, v: requests.checked_deadline(v)
    yield "profile", lambda n, v: DecodeProfile(**{"subject": SUBJECT, "points": (), n: v})


NOT_ALONE = {
    *(("sampling", "stop_token_ids"), ("sampling", "stop_sequences"), ("deployment", "tp_sizes")),
    *(("loss", "token_range"), ("loss", "sequence_range"), ("profile", "minutes")),
    *(("layout", "ep"), ("elastic", "max"), ("lora", "rank"), ("model", "hidden")),
}
"""Options that are several numbers, or of which another one decides too."""


@pytest.mark.parametrize(
    ("group", "name", "take"),
    [
        (group, name, take)
        for group, take in takers()
        for name in LIMITS[group]
        if (group, name) not in NOT_ALONE
    ],
)
def test_the_sdk_refuses_an_option_beyond_its_bounds_before_anything_is_sent(
    group: str, name: str, take: Callable[[str, Any], object]
) -> None:
    accepted, refused = edges(LIMITS[group][name])
    for value in accepted:
        take(name, value)
    for value in refused:
        if value is None and group in ("loss", "sampling"):
            continue  # A field that may not be absent has a default.
        with pytest.raises((InvalidRequestError, LayoutError), match=rf"\b{name}\b"):
            take(name, value)


@pytest.mark.parametrize("sizes", [[0], [True], ["2"], [1.0], [math.nan], "12"])
def test_sizes_of_groups_are_whole_numbers(sizes: Any) -> None:
    with pytest.raises(LayoutError, match="tp_sizes"):
        checked_layout({"tp_sizes": sizes})


@pytest.mark.parametrize("seed", [True, "1", 1.5, 2**64, None])
def test_the_seed_of_a_model_is_a_whole_number(seed: Any) -> None:
    with pytest.raises(InvalidRequestError, match="seed is"):
        check_model(replace(MODEL, seed=seed))


BODIES: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
    "job": (schemas.JobRequest, {"job": "j", "name": "n"}),
    "tenant": (tenants.TenantSettings, {}),
    "key": (tenants.KeyRequest, {}),
    "deployment": (schemas.DeploymentRequest, {"name": "n", "kind": "train", "model": {}}),
    "lora": (schemas.LoraRequest, {"rank": 1}),
    "layout": (schemas.ParallelismRequest, {}),
    "segment": (schemas.SegmentRequest, {"offset_s": 0, "duration_s": 1}),
    "pause": (schemas.PauseRequest, {}),
    "switch": (schemas.TpRequest, {"tp": 1}),
    "metrics": (schemas.MetricsRequest, {"values": {}}),
}


@pytest.mark.parametrize(
    ("group", "name"),
    [
        (group, name)
        for group, (model, _) in BODIES.items()
        for name in LIMITS[group]
        if name in model.model_fields and name != "tp_sizes"
    ],
)
def test_the_router_refuses_the_same(group: str, name: str) -> None:
    model, rest = BODIES[group]
    accepted, refused = edges(LIMITS[group][name])
    for value in accepted:
        model.model_validate({**rest, name: value})
    for value in refused:
        with pytest.raises(ValidationError) as error:
            model.model_validate({**rest, name: value})
        first = error.value.errors()[0]
        assert first["loc"] == (name,)
        assert first["msg"].startswith(f"it must be {LIMITS[group][name]}")


@pytest.mark.parametrize("text", ["nan", "inf", "-1", "True", "x", ""])
def test_the_router_refuses_the_same_in_a_query(text: str) -> None:
    wait = TypeAdapter[float](Annotated[float, Limited("page", "wait_s", in_query=True)])
    assert wait.validate_python("2.5") == 2.5
    with pytest.raises(ValidationError, match="it must be a number, at least 0"):
        wait.validate_python(text)


def test_a_step_does_not_turn_weights_around() -> None:
    check_parameters(AdamParams(learning_rate=1.0, weight_decay=1.0))
    with pytest.raises(InvalidRequestError, match=r"weight_decay is 1000 and learning_rate 0\.1"):
        check_parameters(AdamParams(learning_rate=0.1, weight_decay=1000.0))


@pytest.mark.parametrize("pair", [(0.5,), (1.0, 0.5), (-1.0, 1.0), (0, math.nan), (True, 2), "12"])
def test_a_range_is_two_numbers_in_order(pair: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"loss.token_range is"):
        check_loss(LossSpec(name="decoupled_ppo", token_range=pair))
