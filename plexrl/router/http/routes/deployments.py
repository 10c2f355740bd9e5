"""Routes about a job's deployments."""

import asyncio
from typing import Annotated

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel, ConfigDict, Field

from plexrl.errors import ModelDoesNotFitError, NotFoundError, PermissionDeniedError
from plexrl.model.deployment_spec import DeploymentSpec, deployment_spec_from_json
from plexrl.model.layout import with_layout
from plexrl.model.memory.device_memory import device_memory
from plexrl.model.parallelism import Parallelism
from plexrl.model.spec import ModelSpec, parameter_count
from plexrl.model.text.files import MODEL, TOKENIZER, text_files
from plexrl.model.text.tokenizer import vocabulary_files
from plexrl.router.http.deployment_checks import (
    check_deployment,
    state_bytes,
    with_fitting_length,
)
from plexrl.router.http.schemas import (
    CopyRequest,
    DeploymentRequest,
    Limited,
    ParallelismRequest,
    PlainText,
    TraceRequest,
)
from plexrl.router.http.view_route import ViewRoute
from plexrl.router.services.authentication import Caller
from plexrl.router.services.services import RouterServices, Services
from plexrl.storage.location import is_url
from plexrl.storage.model_folder import model_folder
from plexrl.wire import scheduler_methods as m
from plexrl.wire.messages.overview_views import QuoteView
from plexrl.wire.messages.views import (
    CreatedDeploymentView,
    DeploymentStatus,
    DeploymentView,
    FailureView,
    TextFilesView,
)
from plexrl.wire.parameter_checks import check_name

ROUTES = APIRouter(prefix="/v1/jobs", tags=["deployments"], route_class=ViewRoute)


class QuoteRow(BaseModel):
    """A job as a row of a trace describes it."""

    model_config = ConfigDict(extra="forbid")

    gpus: Annotated[int, Limited("quote", "gpus")]
    rollout_gpus: Annotated[int, Limited("quote", "rollout_gpus")] = 0
    state_bytes: Annotated[int, Limited("quote", "state_bytes")] = 1
    node_type: str = ""
    trace: TraceRequest | None = None


class QuoteRequest(BaseModel):
    """A job that may be submitted."""

    model_config = ConfigDict(extra="forbid")

    name: PlainText = Field(max_length=200)
    tenant: str | None = Field(None, description="for operators: the tenant that would own it")
    steps: Annotated[int | None, Limited("quote", "steps")] = Field(
        None, description="cycles; absent: as `expected_s` says, or as earlier jobs of the name"
    )
    expected_s: Annotated[float | None, Limited("quote", "expected_s")] = None
    priority: Annotated[int, Limited("job", "priority")] = 0
    slo: Annotated[float | None, Limited("job", "slo")] = None
    price: Annotated[float | None, Limited("quote", "price")] = Field(
        None, description="of a GPU-hour"
    )
    like: str | None = Field(None, description="id of an own job with the same demand")
    row: QuoteRow | None = None
    deployments: list[DeploymentRequest] = Field([], max_length=32)


@ROUTES.post("/{job}/deployments", status_code=201, summary="Create a deployment")
async def deploy(
    request: Request, services: Services, job: str, body: DeploymentRequest
) -> CreatedDeploymentView:
    """A request with the name of an existing deployment returns that deployment."""
    caller = await services.caller(request)
    spec, parameters = await _checked(services, caller, body)
    asked = {**_asked(job, body, spec, parameters), **caller.claim}
    try:
        view = await services.scheduler.call(m.CREATE_DEPLOYMENT, asked)
    except ModelDoesNotFitError as error:
        is_default = body.max_sequence_tokens is None
        raise with_fitting_length(error, spec, is_default=is_default) from error
    return {**view, "parameters": parameters}


@ROUTES.post("/quote", summary="When a job would start and end, and what it would cost")
async def quote(request: Request, services: Services, body: QuoteRequest) -> QuoteView:
    """Nothing is submitted. The job is described by `deployments`, by a job that it is `like`, or
    by a `row`. 429 `overloaded` if another quote is being made."""
    caller = await services.caller(request)
    if body.tenant is not None and not caller.sees_all and body.tenant != caller.tenant:
        raise PermissionDeniedError("only operators and viewers ask for other tenants")
    asked = body.model_dump(exclude={"deployments", "tenant", "price"}, exclude_none=True)
    described = []
    for deployment in body.deployments:
        spec, parameters = await _checked(services, caller, deployment)
        described.append(_asked("asked", deployment, spec, parameters))
    fields = {**asked, "deployments": described}
    return await services.quotes.answer(body.tenant or caller.tenant, fields, body.price)


@ROUTES.get("/{job}/deployments/{name}", summary="One deployment")
async def deployment(request: Request, services: Services, job: str, name: str) -> DeploymentStatus:
    """For a rollout deployment `engines` holds the statistics of its engines."""
    caller = await services.caller(request)
    view = await services.deployment(caller, f"{job}/{name}")
    return {**view, "engines": await services.engines.stats(view)}


@ROUTES.delete("/{job}/deployments/{name}", summary="End a deployment; its job goes on")
async def end(request: Request, services: Services, job: str, name: str) -> DeploymentView:
    """Its GPUs, memory and disk space are free again. What it has not done fails as cancelled, and
    it takes no more operations. A deployment that has ended stays as it is."""
    return await services.ask(request, m.END_DEPLOYMENT, deployment=f"{job}/{name}")


@ROUTES.post(
    "/{job}/deployments/{name}/copies", status_code=201, summary="Create a deployment like this one"
)
async def copy(
    request: Request, services: Services, job: str, name: str, body: CopyRequest
) -> DeploymentView:
    """The copy has the same model, layout and settings, and the model's initial weights. A request
    with the name and the settings of an existing deployment returns that one."""
    caller = await services.caller(request)
    check_name("deployment", body.name)
    view = await services.deployment(caller, f"{job}/{name}")
    spec = deployment_spec_from_json(view["spec_json"])
    return await services.ask(
        request,
        m.CREATE_DEPLOYMENT,
        deployment=f"{job}/{body.name}",
        job=job,
        # `exclusive` says it already, of a rollout that does not share its GPUs.
        shares=not view["shares_if_scarce"],
        shares_if_scarce=view["shares_if_scarce"],
        kind=view["kind"],
        workers=view["workers"],
        state_bytes=view["state_bytes"],
        exclusive=view["exclusive"] and not view["shares_if_scarce"],
        spec_json=view["spec_json"],
        node_type=view["node_type"],
        pace=view["pace"],
        checkpoints=view["checkpoints"],
        preemptible=view["preemptible"],
        steps_in_host=spec.steps_in_host,
        memory=msgspec.to_builtins(device_memory(spec)),
    )


@ROUTES.put(
    "/{job}/deployments/{name}/parallelism",
    summary="Divide a rollout deployment's GPUs in another way",
)
async def set_parallelism(
    request: Request, services: Services, job: str, name: str, body: ParallelismRequest
) -> DeploymentView:
    """Its workers start again, with the weights of its last sync; generations in progress are
    repeated. The layout has as many workers as before."""
    caller = await services.caller(request)
    deployment = f"{job}/{name}"
    view = await services.deployment(caller, deployment)
    layout = Parallelism(**body.model_dump())
    spec = with_layout(deployment_spec_from_json(view["spec_json"]), layout)
    return await services.ask(
        request,
        m.RELAYOUT_DEPLOYMENT,
        deployment=deployment,
        state_bytes=state_bytes(spec, parameter_count(spec.model)),
        memory=msgspec.to_builtins(device_memory(spec)),
        spec_json=spec.to_json(),
    )


@ROUTES.post(
    "/{job}/deployments/{name}/recover",
    summary="Acknowledge the failures that halt a deployment",
)
async def recover(request: Request, services: Services, job: str, name: str) -> FailureView:
    """`failure` is the job's next failure to acknowledge."""
    return await services.ask(request, m.ACKNOWLEDGE, deployment=f"{job}/{name}")


@ROUTES.get(
    "/{job}/deployments/{name}/tokenizer",
    summary="The model's tokenizer.json",
    response_class=PlainTextResponse,
)
async def tokenizer(request: Request, services: Services, job: str, name: str) -> PlainTextResponse:
    """404 if the model has neither a `tokenizer.json` nor a vocabulary."""
    caller = await services.caller(request)
    spec = await services.spec(f"{job}/{name}", caller)
    if spec.model.path is not None:
        # The directory may have changed since the deployment was created.
        await services.model_access.check(spec.model.path, caller)
    loop = asyncio.get_running_loop()
    files = await loop.run_in_executor(services.threads, texts_of, spec.model)
    return PlainTextResponse(files[TOKENIZER], media_type="application/json")


@ROUTES.get("/{job}/deployments/{name}/text-files", summary="What encodes the model's text")
async def model_text_files(
    request: Request, services: Services, job: str, name: str
) -> TextFilesView:
    """The text of `tokenizer.json`, its configuration, chat templates and end tokens, by the
    name of the file. 404 if the model has neither a `tokenizer.json` nor a vocabulary."""
    caller = await services.caller(request)
    spec = await services.spec(f"{job}/{name}", caller)
    if spec.model.path is not None:
        # The directory may have changed since the deployment was created.
        await services.model_access.check(spec.model.path, caller)
    loop = asyncio.get_running_loop()
    return {"files": await loop.run_in_executor(services.threads, texts_of, spec.model)}


def texts_of(model: ModelSpec) -> dict[str, str]:
    """What encodes a model's text, by file name. Raises `NotFoundError`."""
    if model.path is not None:
        found = text_files(model_folder(model.path, weights=False))
        if TOKENIZER not in found:
            raise NotFoundError(f"{model.path} holds no tokenizer.json")
        return found
    if not model.vocabulary:
        raise NotFoundError("the model was made without a vocabulary, so it has no tokenizer")
    return {**vocabulary_files(model.vocabulary), MODEL: model.config_json}


async def _checked(
    services: RouterServices, caller: Caller, body: DeploymentRequest
) -> tuple[DeploymentSpec, int]:
    """The specification of a deployment, and the number of the model's parameters."""
    check_name("deployment", body.name)
    if body.model.path is not None:
        await services.model_access.check(body.model.path, caller)
    # The configuration of a model at a URL is read over the network.
    if body.model.path is not None and is_url(body.model.path):
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(services.threads, check_deployment, body)
    return check_deployment(body)


def _asked(
    job: str, body: DeploymentRequest, spec: DeploymentSpec, parameters: int
) -> dict[str, object]:
    """The deployment as the scheduler is asked for it."""
    return {
        "deployment": f"{job}/{body.name}",
        "job": job,
        "kind": spec.kind,
        "workers": spec.workers,
        "state_bytes": state_bytes(spec, parameters),
        "memory": msgspec.to_builtins(device_memory(spec)),
        "exclusive": body.exclusive,
        "shares": body.shares_gpus is True,
        "shares_if_scarce": body.kind == "rollout"
        and body.shares_gpus is None
        and not (body.exclusive or body.preemptible),
        "preemptible": body.preemptible,
        "spec_json": spec.to_json(),
        "node_type": body.node_type,
        "pace": spec.pace,
        "steps_in_host": spec.steps_in_host,
        "checkpoints": (
            None
            if body.checkpoint_every is None
            else {
                "every": body.checkpoint_every,
                "keep_last": body.checkpoint_keep,
                "keep_bytes": body.checkpoint_bytes,
            }
        ),
        "trace": None if body.trace is None else body.trace.model_dump(),
    }
