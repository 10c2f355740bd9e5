"""Routes about jobs and their deployments."""

import asyncio
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse

from plexrl.errors import (
    InvalidRequestError,
    LayoutError,
    NotFoundError,
    PermissionDeniedError,
)
from plexrl.model.capabilities import (
    backend_capabilities,
    check_adapters,
    check_architecture,
    check_computation,
    check_dtype,
    check_layout,
    check_optimizer,
)
from plexrl.model.deployment_spec import DeploymentSpec
from plexrl.model.kv_cache import check_cache_budget
from plexrl.model.layout import check_equal_parts, check_tensor_parallel
from plexrl.model.lora import LoraSpec, adapter_parameter_count
from plexrl.model.megatron_dimensions import Dimensions, check_cut, dimensions, megatron_state_bytes
from plexrl.model.parallelism import Parallelism
from plexrl.model.spec import (
    TRAIN_BYTES_PER_PARAMETER,
    WEIGHT_BYTES,
    ModelSpec,
    parameter_count,
)
from plexrl.router.http.gateway import Gateway
from plexrl.router.http.schemas import (
    DeploymentRequest,
    FinishRequest,
    JobRequest,
    LoraRequest,
    MetricsRequest,
)
from plexrl.wire.parameter_checks import check_identifier, check_name

Plain = dict[str, Any]


def job_routes(gateway: Gateway) -> APIRouter:
    """Jobs, their metrics and logs."""
    routes = APIRouter(prefix="/v1/jobs", tags=["jobs"])

    @routes.post("", status_code=201, summary="Submit a job")
    async def submit(request: Request, body: JobRequest) -> Plain:
        caller = await gateway.caller(request)
        check_identifier("job", body.job)
        if "/" in body.job:
            raise InvalidRequestError("a job id has no '/': deployments are named <job>/<name>")
        if body.tenant is not None and not caller.is_operator and body.tenant != caller.tenant:
            raise PermissionDeniedError("only the operator submits jobs for other tenants")
        fields = body.model_dump()
        fields["tenant"] = body.tenant or caller.tenant
        fields["controller"] = caller.controller
        return await gateway.scheduler.call("submit_job", fields)

    @routes.get("", summary="All jobs that the caller may see")
    async def list_jobs(request: Request) -> Plain:
        caller = await gateway.caller(request)
        return await gateway.scheduler.call("list_jobs", caller.claim)

    @routes.get("/{job}", summary="One job with its deployments")
    async def get(request: Request, job: str) -> Plain:
        caller = await gateway.caller(request)
        return await gateway.scheduler.call("get_job", {"job": job, **caller.claim})

    @routes.get("/{job}/explain", summary="Why the job waits or runs as it does, and until when")
    async def explain(request: Request, job: str) -> Plain:
        caller = await gateway.caller(request)
        return await gateway.scheduler.call("explain_job", {"job": job, **caller.claim})

    @routes.post("/{job}/finish", summary="Declare a job's end")
    async def finish(request: Request, job: str, body: FinishRequest) -> Plain:
        caller = await gateway.caller(request)
        fields = {"job": job, **caller.claim, **body.model_dump()}
        return await gateway.scheduler.call("finish_job", fields)

    @routes.post("/{job}/heartbeat", summary="The controller lives; re-attaches a detached job")
    async def heartbeat(request: Request, job: str) -> Plain:
        caller = await gateway.caller(request)
        return await gateway.scheduler.call("heartbeat", {"job": job, **caller.claim})

    @routes.post(
        "/{job}/attach",
        summary="Become the job's controller",
        description="The header `PlexRL-Controller` names the new controller by a token of its own "
        "choice. From then on requests for the job with another token get 409 "
        "`controller_replaced`; those without one are not looked at. Gradients that wait for a "
        "step are dropped, unless `keep_gradients` is set.",
    )
    async def attach(request: Request, job: str, keep_gradients: bool = False) -> Plain:
        caller = await gateway.caller(request)
        fields = {"job": job, **caller.claim, "keep_gradients": keep_gradients}
        return await gateway.scheduler.call("attach_job", {"controller": "", **fields})

    @routes.post("/{job}/metrics", status_code=204, summary="Add a row of metrics")
    async def add_metrics(request: Request, job: str, body: MetricsRequest) -> None:
        caller = await gateway.caller(request)
        await gateway.scheduler.call("get_job", {"job": job, **caller.claim})
        gateway.metrics.append(job, body.step, body.values)

    @routes.get(
        "/{job}/metrics",
        summary="Metrics behind row `after`",
        description="About a megabyte of rows at a time: ask again behind the last one's `index` "
        "until there are none.",
        response_class=JSONResponse,
    )
    async def metrics(request: Request, job: str, after: int = 0) -> Response:
        caller = await gateway.caller(request)
        await gateway.scheduler.call("get_job", {"job": job, **caller.claim})
        found = await asyncio.to_thread(gateway.metrics.page, job, after)
        return Response(found, media_type="application/json")

    @routes.get("/{job}/logs", summary="The ends of the job's worker logs")
    async def logs(
        request: Request, job: str, deployment: str | None = None, lines: int = 100
    ) -> Plain:
        caller = await gateway.caller(request)
        fields = {"job": job, **caller.claim, "deployment": deployment, "lines": lines}
        return await gateway.scheduler.call("read_log", fields)

    @routes.get("/{job}/checkpoints", summary="The job's checkpoints, those under way too")
    async def checkpoints(request: Request, job: str) -> Plain:
        caller = await gateway.caller(request)
        return await gateway.scheduler.call("list_checkpoints", {"job": job, **caller.claim})

    @routes.delete(
        "/{job}/checkpoints/{name}", status_code=204, summary="Delete a checkpoint from the disk"
    )
    async def delete_checkpoint(request: Request, job: str, name: str) -> None:
        caller = await gateway.caller(request)
        await gateway.checkpoint_owners.check_job(job, caller.claim)
        await gateway.checkpoint_quota.delete(job, name)

    return routes


def deployment_routes(gateway: Gateway) -> APIRouter:
    """A job's deployments."""
    routes = APIRouter(prefix="/v1/jobs", tags=["deployments"])

    @routes.post("/{job}/deployments", status_code=201, summary="Create a deployment")
    async def deploy(request: Request, job: str, body: DeploymentRequest) -> Plain:
        caller = await gateway.caller(request)
        check_name("deployment", body.name)
        if body.model.path is not None:
            await gateway.checkpoint_owners.check_path(body.model.path, caller.rights)
        spec, parameters = check_deployment(body)
        view = await gateway.scheduler.call(
            "create_deployment",
            {
                "deployment": f"{job}/{body.name}",
                "job": job,
                **caller.claim,
                "kind": spec.kind,
                "workers": spec.workers,
                "state_bytes": state_bytes(spec, parameters),
                "exclusive": body.exclusive,
                "spec_json": spec.to_json(),
                "node_type": body.node_type,
                "trace": None if body.trace is None else body.trace.model_dump(),
            },
        )
        return {**view, "parameters": parameters}

    @routes.get("/{job}/deployments/{name}", summary="One deployment")
    async def deployment(request: Request, job: str, name: str) -> Plain:
        caller = await gateway.caller(request)
        view = await gateway.deployment(caller, f"{job}/{name}")
        return {**view, "engines": await gateway.engines.stats(view)}

    @routes.post(
        "/{job}/deployments/{name}/recover",
        summary="Acknowledge whatever halts a deployment",
        description="`failure` is what is left to acknowledge of the job.",
    )
    async def recover(request: Request, job: str, name: str) -> Plain:
        caller = await gateway.caller(request)
        fields = {"deployment": f"{job}/{name}", **caller.claim}
        return await gateway.scheduler.call("acknowledge", fields)

    @routes.get(
        "/{job}/deployments/{name}/tokenizer",
        summary="The model's tokenizer.json",
        response_class=PlainTextResponse,
    )
    async def tokenizer(request: Request, job: str, name: str) -> PlainTextResponse:
        caller = await gateway.caller(request)
        spec = await gateway.spec(f"{job}/{name}", caller)
        return PlainTextResponse(_tokenizer_json(spec.model), media_type="application/json")

    return routes


def check_deployment(body: DeploymentRequest) -> tuple[DeploymentSpec, int]:
    """The deployment's specification and its model's parameter count.

    Raises:
        InvalidRequestError: no such backend, or a model that cannot be built.
        LayoutError: a layout that cannot be, has not the workers, or the backend cannot run.
    """
    model = ModelSpec(**body.model.model_dump())
    if (model.path is None) == (model.architecture is None):
        raise InvalidRequestError("a model has either a path or an architecture")
    capabilities = backend_capabilities(body.kind, body.backend or None)
    check_architecture(capabilities, model)
    parameters = parameter_count(model)
    layout = _layout(body)
    check_layout(capabilities, layout)
    check_optimizer(capabilities, body.optimizer)
    check_dtype(capabilities, body.dtype)
    check_computation(
        capabilities,
        body.compute_dtype,
        activation_checkpointing=body.activation_checkpointing,
    )
    check_tensor_parallel(model, layout)
    if body.kind == "rollout":
        check_equal_parts(model, layout)
    if model.head != "causal" and body.kind != "forward":
        raise InvalidRequestError(
            f"a model with head {model.head!r} only scores rows: make a reward deployment of it, "
            f"not a {body.kind} deployment"
        )
    if body.kind == "rollout" and body.trace is not None:
        raise InvalidRequestError(
            "a rollout deployment has its GPUs to itself, so a demand trace says nothing of it: "
            "leave the trace out"
        )
    lora = None
    if body.lora is not None:
        check_adapters(capabilities, layout)
        lora = LoraSpec(**_lora_fields(body.lora))
        adapter_parameter_count(model, lora)
    if capabilities.backend == "megatron":
        check_cut(_dimensions(model), layout)
    spec = DeploymentSpec(
        model=model,
        kind=body.kind,
        backend=capabilities.backend,
        workers=layout.world_size,
        parallelism=layout,
        optimizer=body.optimizer,
        dtype=body.dtype,
        lora=lora,
        compute_dtype=body.compute_dtype,
        activation_checkpointing=body.activation_checkpointing,
        max_sequence_tokens=body.max_sequence_tokens,
        max_concurrent_samples=body.max_concurrent_samples,
        kv_cache_bytes=body.kv_cache_bytes,
    )
    positions = model.config.get("max_position_embeddings")
    if isinstance(positions, int) and spec.max_sequence_tokens > positions:
        raise InvalidRequestError(
            f"max_sequence_tokens is {spec.max_sequence_tokens}; the model has {positions} "
            "positions: lower it"
        )
    check_cache_budget(spec)
    return spec, parameters


def state_bytes(spec: DeploymentSpec, parameters: int) -> int:
    """Of all ranks: a trainer's are shards; of the others each data rank has all weights."""
    adapters = adapter_parameter_count(spec.model, spec.lora) if spec.lora is not None else 0
    if spec.kind == "train" and spec.lora is not None:
        # The frozen weights are on the device too, if only once for all that lie on them.
        return parameters * WEIGHT_BYTES["float32"] + adapters * TRAIN_BYTES_PER_PARAMETER
    if spec.backend == "megatron":
        return megatron_state_bytes(_dimensions(spec.model), spec.layout, parameters)
    if spec.kind == "train":
        return parameters * TRAIN_BYTES_PER_PARAMETER
    # What adapters are added to is kept beside what comes of it.
    copies = 2 if spec.lora is not None else 1
    weights = parameters * WEIGHT_BYTES[spec.dtype] * copies
    return (weights + adapters * WEIGHT_BYTES["float32"]) * spec.layout.dp


def _lora_fields(body: LoraRequest) -> Plain:
    fields = body.model_dump(exclude_none=True)
    if "targets" in fields:
        fields["targets"] = tuple(fields["targets"])
    return fields


def _dimensions(model: ModelSpec) -> Dimensions:
    return dimensions({"model_type": model.architecture, **model.config})


def _layout(body: DeploymentRequest) -> Parallelism:
    if body.parallelism is None:
        return Parallelism(dp=body.workers or 1)
    layout = Parallelism(**body.parallelism.model_dump())
    if body.workers not in (None, layout.world_size):
        raise LayoutError(
            f"{body.workers} workers were asked for and {layout.describe()} needs "
            f"{layout.world_size} (dp·tp·pp·cp): leave workers out, or make them agree",
            field="workers",
        )
    return layout


def _tokenizer_json(model: ModelSpec) -> str:
    from pathlib import Path

    from plexrl.model.tokenizer import char_tokenizer_json

    if model.path is not None:
        path = Path(model.path) / "tokenizer.json"
        if not path.is_file():
            raise NotFoundError(f"{model.path} holds no tokenizer.json")
        return path.read_text()
    if not model.vocabulary:
        raise NotFoundError("the model was made without a vocabulary, so it has no tokenizer")
    return char_tokenizer_json(model.vocabulary)
