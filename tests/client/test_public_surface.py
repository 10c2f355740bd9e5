"""What a user's editor shows of the SDK: explicit arguments, all of them documented and typed, and
the same for blocking and `async` controllers."""

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

import plexrl
from plexrl.router.http.schemas import DeploymentRequest, JobRequest, PauseRequest
from plexrl.wire.operations import AdamParams, CheckpointParams, SyncWeightsParams

PAIRS = [
    (getattr(plexrl, name.removeprefix("Async")), getattr(plexrl, name))
    for name in plexrl.__all__
    if name.startswith("Async")
]


def ident(value: object) -> str:
    return getattr(value, "__qualname__", "")


def public_classes() -> list[type]:
    found = [getattr(plexrl, name) for name in plexrl.__all__]
    return [each for each in found if inspect.isclass(each) and each.__module__ != "builtins"]


def methods(cls: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Public methods by name, and `__init__` if users call it."""
    for name, member in inspect.getmembers(cls):
        if name.startswith("_") or not (inspect.isfunction(member) or inspect.ismethod(member)):
            continue
        if (member.__module__ or "").startswith("plexrl"):
            yield name, getattr(member, "__func__", member)


def public_calls() -> list[Callable[..., Any]]:
    found: dict[str, Callable[..., Any]] = {}
    for cls in public_classes():
        if not issubclass(cls, Exception):
            found |= {call.__qualname__: call for _, call in methods(cls)}
    for name in ("connect", "connect_async", "tiny_qwen2"):
        found[name] = getattr(plexrl, name)
    for name, call in inspect.getmembers(plexrl.losses, inspect.isfunction):
        if call.__module__ == plexrl.losses.__name__:
            found[f"losses.{name}"] = call
    return list(found.values())


CALLS = public_calls()


def arguments(call: Callable[..., Any]) -> list[inspect.Parameter]:
    found = inspect.signature(call).parameters.values()
    return [each for each in found if each.name not in ("self", "cls")]


def sync_of(call: Callable[..., Any]) -> Callable[..., Any] | None:
    """The blocking method that a docstring such as "As `Deployment.within`." refers to."""
    found = re.match(r"As `(\w+)(?:\.(\w+))?`[.,]", (call.__doc__ or "").strip())
    if found is None:
        return None
    # The base class of all deployments is reached by any of them.
    name = "TrainDeployment" if found[1] == "Deployment" else found[1]
    documented: Callable[..., Any] = getattr(plexrl, name)
    if found[2] is not None:
        documented = getattr(documented, found[2])
    return documented


@pytest.mark.parametrize("call", CALLS, ids=ident)
def test_every_argument_is_named(call: Callable[..., Any]) -> None:
    collected = {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}
    hidden = [each.name for each in arguments(call) if each.kind in collected]
    # A layout's axes are a list of names.
    assert hidden in ([], ["axes"]), f"{call.__qualname__} hides its arguments in {hidden}"


@pytest.mark.parametrize("call", CALLS, ids=ident)
def test_every_argument_is_in_the_docstring(call: Callable[..., Any]) -> None:
    names = [each.name for each in arguments(call)]
    documented = sync_of(call)
    if documented is None or names != [each.name for each in arguments(documented)]:
        documented = call
    text = inspect.getdoc(documented) or ""
    assert text, f"{documented.__qualname__} has no docstring"
    missing = [name for name in names if not re.search(rf"\b{name}\b", text)]
    assert not missing, f"the docstring of {documented.__qualname__} says nothing of {missing}"


def guide() -> str:
    """The page of the SDK and those that its table leads to."""
    folder = Path(__file__).parents[2] / "docs"
    first = (folder / "sdk.md").read_text()
    others = re.findall(r"^\|.*\]\((\w+\.md)\) \|$", first, re.MULTILINE)
    return "\n".join([first, *((folder / name).read_text() for name in others)])


def test_the_guide_has_every_argument() -> None:
    text = guide()
    missing = [
        f"{name} of {call.__qualname__}"
        for call in CALLS
        if not call.__qualname__.startswith("Parallelism.")
        for name in [call.__name__, *(each.name for each in arguments(call))]
        if not re.search(rf"\b{name}\b", text)
    ]
    assert not missing


@pytest.mark.parametrize("call", CALLS, ids=ident)
def test_no_argument_or_result_is_any(call: Callable[..., Any]) -> None:
    for name, parameter in inspect.signature(call).parameters.items():
        if name not in ("self", "cls"):
            shown = str(parameter.annotation)
            assert parameter.annotation is not inspect.Parameter.empty, name
            assert shown not in ("Any", "typing.Any"), f"{name} of {call.__qualname__} is Any"
    answer = inspect.signature(call).return_annotation
    assert answer is not inspect.Signature.empty
    # A view is a JSON object, as the HTTP API answers it.
    shown = str(answer).replace("typing.", "").replace("dict[str, Any]", "view")
    assert not re.search(r"\bAny\b", shown), f"{call.__qualname__} answers {answer}"


@pytest.mark.parametrize("cls", public_classes(), ids=ident)
def test_every_field_is_documented_and_typed(cls: type) -> None:
    if not is_dataclass(cls) or issubclass(cls, Exception):
        return
    body = inspect.getsource(cls)
    for field in fields(cls):
        assert str(field.type) not in ("Any", "typing.Any")
        pattern = rf'^    {field.name}: (?:.|\n(?!    \w))*?\n    """'
        assert re.search(pattern, body, re.M), f"{cls.__name__}.{field.name} is not documented"


def surface(cls: type) -> dict[str, str]:
    """Public methods and properties of a class, with signatures mapped to blocking classes."""
    found: dict[str, str] = {}
    for name, member in inspect.getmembers(cls):
        if name.startswith("_"):
            continue
        if isinstance(member, property):
            found[name] = "property"
        elif callable(member):
            found[name] = blocking(str(inspect.signature(member)))
    return found


def blocking(signature: str) -> str:
    found = re.sub(r"\bplexrl\.client\.[a-z_.]*", "", signature).replace("'", "")
    return found.replace("Async", "").replace("collections.abc.Iterator", "Iterator")


@pytest.mark.parametrize(("sync", "aio"), PAIRS, ids=ident)
def test_async_classes_have_the_surface_of_the_blocking_ones(sync: type, aio: type) -> None:
    wanted, found = surface(sync), surface(aio)
    for base in sync.__mro__:
        if base.__module__.startswith("plexrl"):
            own = re.findall(r"^        self\.([a-z]\w*)(?::| =)", inspect.getsource(base), re.M)
            wanted |= dict.fromkeys(own, "property")
    assert found == wanted


def test_both_connect_functions_have_the_same_arguments() -> None:
    sync, aio = inspect.signature(plexrl.connect), inspect.signature(plexrl.connect_async)
    assert blocking(str(aio)) == blocking(str(sync))


@pytest.mark.parametrize(
    ("call", "params", "others"),
    [
        (plexrl.TrainDeployment.optim_step, AdamParams, set()),
        (plexrl.TrainDeployment.save_checkpoint, CheckpointParams, {"job", "optimizer"}),
        (plexrl.RolloutDeployment.sync_weights, SyncWeightsParams, {"ahead"}),
    ],
    ids=ident,
)
def test_defaults_match_the_wire_types(
    call: Callable[..., Any], params: type, others: set[str]
) -> None:
    wanted = {
        name: parameter.default
        for name, parameter in inspect.signature(params).parameters.items()
        if name not in others
    }
    assert {each.name: each.default for each in arguments(call)} == wanted


@pytest.mark.parametrize(
    ("call", "request_type"),
    [
        (plexrl.Cluster.create_job, JobRequest),
        (plexrl.Job.train_deployment, DeploymentRequest),
        (plexrl.Job.rollout_deployment, DeploymentRequest),
        (plexrl.Job.reference_deployment, DeploymentRequest),
        (plexrl.Job.reward_deployment, DeploymentRequest),
        (plexrl.RolloutDeployment.pause, PauseRequest),
    ],
    ids=ident,
)
def test_defaults_match_the_http_api(
    call: Callable[..., Any], request_type: type[BaseModel]
) -> None:
    wanted = {name: field.default for name, field in request_type.model_fields.items()}
    # The SDK generates the id that the API needs, and feeds trackers; without `workers` one worker
    # is meant. A dry run submits nothing.
    own = ("job_id", "trackers", "workers", "dry_run")
    for argument in arguments(call):
        if argument.default is not inspect.Parameter.empty and argument.name not in own:
            assert argument.default == wanted[argument.name], argument.name


def test_the_package_is_marked_as_typed() -> None:
    assert plexrl.__file__ is not None
    assert (Path(plexrl.__file__).parent / "py.typed").exists()
