"""Routes about jobs: their state, metrics, logs and checkpoints."""

import asyncio
from typing import Annotated

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict

from plexrl.errors import (
    CheckpointNotFoundError,
    ConflictError,
    InvalidRequestError,
    PermissionDeniedError,
)
from plexrl.router.http.schemas import (
    FinishRequest,
    JobRequest,
    Limited,
    MetricsRequest,
    SamplesRequest,
)
from plexrl.router.http.view_route import ViewRoute
from plexrl.router.job_files.record_store import JobKey
from plexrl.router.observe.run_health import check_limits
from plexrl.router.services.services import Services, job_key
from plexrl.runs.records import FOLDER, RunRecords
from plexrl.wire import scheduler_methods as m
from plexrl.wire.messages.node_queries import (
    CheckpointFiles,
    FileView,
    JobCheckpoints,
    JobLogs,
    LogView,
)
from plexrl.wire.messages.run_views import LoggedRow, SampledSteps, SampleView, StepSamples
from plexrl.wire.messages.views import (
    ExplainedJobView,
    HeartbeatView,
    Jobs,
    JobView,
)
from plexrl.wire.parameter_checks import check_identifier

CONTROLLER = "controller"


class ShareRequest(BaseModel):
    """The job that gets a checkpoint, and its name there."""

    model_config = ConfigDict(extra="forbid")

    job: str
    name: str


ROUTES = APIRouter(prefix="/v1/jobs", tags=["jobs"], route_class=ViewRoute)


@ROUTES.post("", status_code=201, summary="Submit a job")
async def submit(request: Request, services: Services, body: JobRequest) -> JobView:
    """A request with the id of a live job returns that job."""
    caller = await services.caller(request)
    check_identifier("job", body.job)
    if "/" in body.job:
        raise InvalidRequestError(
            f"job id {body.job!r} has a '/': leave it out, deployments are named <job>/<name>"
        )
    if body.tenant is not None and not caller.is_operator and body.tenant != caller.tenant:
        raise PermissionDeniedError("only the operator submits jobs for other tenants")
    fields = body.model_dump()
    warnings = fields.pop("run_warnings")
    limits = {} if isinstance(warnings, bool) else check_limits(warnings)
    fields["tenant"] = body.tenant or caller.tenant
    fields["controller"] = caller.controller
    fields["user"] = caller.user if fields["tenant"] == caller.tenant else ""
    view = await services.scheduler.call(m.SUBMIT_JOB, fields)
    if warnings is not True:
        await services.run_watch.begin(job_key(view), on=warnings is not False, limits=limits)
    return view


@ROUTES.get("", summary="All jobs that the caller may see")
async def list_jobs(request: Request, services: Services) -> Jobs:
    """The tenant's own jobs; for the operator all jobs."""
    return await services.ask(request, m.LIST_JOBS)


@ROUTES.get("/{job}", summary="One job with its deployments")
async def get(request: Request, services: Services, job: str) -> JobView:
    """State, reason, times and deployments of the job."""
    view = await services.ask(request, m.GET_JOB, job=job)
    return {**view, "health": await services.run_watch.view(job_key(view))}


@ROUTES.get("/{job}/explain", summary="Why the job waits or runs, and until when")
async def explain(request: Request, services: Services, job: str) -> ExplainedJobView:
    """Reasons, holders and estimates for the job's unfinished operations and its deployments, and
    what its asynchronous rollouts wait for, such as rewards (`rollouts`; null: their service does
    not answer)."""
    view = await services.ask(request, m.EXPLAIN_JOB, job=job)
    health = await services.run_watch.view(job_key(view))
    return {**view, "rollouts": await services.rollout_views.waits(job), "health": health}


@ROUTES.post("/{job}/finish", summary="End a job")
async def finish(request: Request, services: Services, job: str, body: FinishRequest) -> JobView:
    """A job that has ended stays as it is."""
    return await services.ask(request, m.FINISH_JOB, job=job, **body.model_dump())


@ROUTES.post("/{job}/heartbeat", summary="Heartbeat of the controller; attaches a detached job")
async def heartbeat(request: Request, services: Services, job: str) -> HeartbeatView:
    """`failure` is the job's first failure that no controller has acknowledged."""
    return await services.ask(request, m.HEARTBEAT, job=job)


@ROUTES.post("/{job}/attach", summary="Become the job's controller")
async def attach(
    request: Request, services: Services, job: str, keep_gradients: bool = False
) -> JobView:
    """The header `PlexRL-Controller` identifies the new controller by a token of its own choice.

    From then on requests for the job with another token get 409 `controller_replaced`; requests
    without a token are not checked. Gradients that wait for a step are dropped, unless
    `keep_gradients` is set.
    """
    fields = {"job": job, "keep_gradients": keep_gradients, "controller": ""}
    return await services.ask(request, m.ATTACH_JOB, **fields)


@ROUTES.post("/{job}/metrics", summary="Add a row of metrics")
async def add_metrics(
    request: Request, services: Services, job: str, body: MetricsRequest
) -> LoggedRow:
    """Rows are only added; a second row with the same step replaces nothing. The answer has the
    warnings of the job's run."""
    key = await _metrics_key(request, services, job)
    loop = asyncio.get_running_loop()
    await loop.run_in_executor(
        services.threads, services.metrics.append, key, body.step, body.values
    )
    return {"warnings": (await services.run_watch.view(key))["warnings"]}


@ROUTES.get(
    "/{job}/metrics",
    summary="Rows of metrics after row `after`",
    response_class=JSONResponse,
)
async def metrics(
    request: Request,
    services: Services,
    job: str,
    after: Annotated[int, Limited("page", "after", in_query=True)] = 0,
) -> Response:
    """About a megabyte of rows. Repeat with the last row's `index` until no rows come."""
    key = await _metrics_key(request, services, job)
    loop = asyncio.get_running_loop()
    found = await loop.run_in_executor(services.threads, services.metrics.page, key, after)
    return Response(found, media_type="application/json")


async def _metrics_key(request: Request, services: Services, job: str) -> JobKey:
    """What the rows of a job are kept by; those of an earlier version are there then too."""
    view = await services.ask(request, m.GET_JOB, job=job)
    key = job_key(view)
    await asyncio.get_running_loop().run_in_executor(
        services.threads, services.metrics.take_over, key, view["submitted_at"]
    )
    return key


@ROUTES.post("/{job}/samples", status_code=204, summary="Keep samples of a step")
async def add_samples(request: Request, services: Services, job: str, body: SamplesRequest) -> None:
    """The samples replace those that the step has. The oldest steps beyond the bounds are
    deleted."""
    key = await services.job_key(request, job)
    rows: list[SampleView] = [
        {
            "prompt": sample.prompt,
            "text": sample.text,
            "reward": sample.reward,
            "length": sample.length,
            "ended_by": sample.ended_by,
        }
        for sample in body.samples
    ]
    loop = asyncio.get_running_loop()
    await loop.run_in_executor(
        services.threads, services.samples.write, key, body.step, rows, body.total
    )
    services.run_watch.rewarded(key, total=body.total, failed=min(body.failed, body.total))


@ROUTES.get("/{job}/samples", summary="The steps that have samples")
async def sampled_steps(request: Request, services: Services, job: str) -> SampledSteps:
    """Numbers of the steps with samples, ascending."""
    key = await services.job_key(request, job)
    loop = asyncio.get_running_loop()
    return {"steps": await loop.run_in_executor(services.threads, services.samples.steps, key)}


@ROUTES.get("/{job}/samples/{step}", summary="The samples of a step")
async def samples(
    request: Request,
    services: Services,
    job: str,
    step: Annotated[int, Limited("metrics", "step", in_query=True)],
) -> StepSamples:
    """404 `not_found` if the step has none."""
    key = await services.job_key(request, job)
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(services.threads, services.samples.read, key, step)


@ROUTES.get("/{job}/logs", summary="The last lines of the job's worker logs")
async def logs(
    request: Request,
    services: Services,
    job: str,
    deployment: str | None = None,
    lines: Annotated[int, Limited("page", "lines", in_query=True)] = 100,
) -> JobLogs:
    """`failed` lists the nodes that returned no logs, and why. A controller that runs on the
    cluster is the deployment `controller` of the node `head`."""
    found = await services.ask(request, m.READ_LOG, job=job, deployment=deployment, lines=lines)
    if not services.runs_max or deployment not in (None, CONTROLLER):
        return found
    caller = await services.caller(request)
    kept = RunRecords(services.data_dir / FOLDER)
    text = await asyncio.to_thread(kept.log_for, caller.scope, job, lines)
    if not text:
        return found
    own: LogView = {"deployment": CONTROLLER, "node": "head", "rank": 0, "text": text}
    return {**found, "logs": [own, *found["logs"]]}


@ROUTES.get("/{job}/checkpoints", summary="The job's checkpoints, also those being written")
async def checkpoints(request: Request, services: Services, job: str) -> JobCheckpoints:
    """`failed` lists the nodes that did not report their checkpoints, and why."""
    return await services.ask(request, m.LIST_CHECKPOINTS, job=job)


@ROUTES.get("/{job}/checkpoints/{name}/files", summary="The files of a complete checkpoint")
async def checkpoint_files(
    request: Request, services: Services, job: str, name: str
) -> CheckpointFiles:
    """Each with its `path` and `bytes`. `version` names this state of the checkpoint."""
    caller = await services.caller(request)
    await services.scheduler.call(m.GET_JOB, {"job": job, **caller.claim})
    version, found = await services.checkpoint_quota.files(job, name)
    listed: list[FileView] = [{"path": file.path, "bytes": file.nbytes} for file in found]
    return {"version": version, "files": listed}


@ROUTES.get(
    "/{job}/checkpoints/{name}/files/{path:path}",
    summary="Bytes of one file of a checkpoint",
    response_class=StreamingResponse,
)
async def checkpoint_file(
    request: Request,
    services: Services,
    job: str,
    name: str,
    path: str,
    start: Annotated[int, Limited("page", "start", in_query=True)] = 0,
    stop: Annotated[int | None, Limited("page", "stop", in_query=True)] = None,
    version: str | None = None,
) -> StreamingResponse:
    """The bytes from `start` to before `stop`. 404 `unknown_checkpoint` if the checkpoint has no
    such file, 409 `conflict` if it is not of that `version` any more."""
    caller = await services.caller(request)
    await services.scheduler.call(m.GET_JOB, {"job": job, **caller.claim})
    current, files = await services.checkpoint_quota.files(job, name)
    if version is not None and version != current:
        raise ConflictError(f"checkpoint {name!r} of job {job!r} was replaced: download it again")
    file = next((file for file in files if file.path == path), None)
    if file is None:
        raise CheckpointNotFoundError(f"checkpoint {name!r} of job {job!r} has no file {path!r}")
    start = min(max(start, 0), file.nbytes)
    stop = file.nbytes if stop is None else min(max(stop, start), file.nbytes)
    return StreamingResponse(
        services.checkpoint_quota.read(job, name, file, start, stop),
        headers={"content-length": str(stop - start)},
        media_type="application/octet-stream",
    )


@ROUTES.post(
    "/{job}/checkpoints/{name}/share",
    status_code=204,
    summary="Give a checkpoint to another job of the tenant, without a copy",
)
async def share_checkpoint(
    request: Request, services: Services, job: str, name: str, body: ShareRequest
) -> None:
    """A repeated request changes nothing. The bytes stay until both jobs have deleted it, and count
    once in the tenant's quota."""
    caller = await services.caller(request)
    source = await services.scheduler.call(m.GET_JOB, {"job": job, **caller.rights})
    fork = await services.scheduler.call(m.GET_JOB, {"job": body.job, **caller.claim})
    if source["tenant"] != fork["tenant"]:
        raise PermissionDeniedError("a checkpoint is shared between jobs of one tenant")
    await services.checkpoint_quota.share(job, name, body.job, body.name)


@ROUTES.delete("/{job}/checkpoints/{name}", status_code=204, summary="Delete a checkpoint")
async def delete_checkpoint(request: Request, services: Services, job: str, name: str) -> None:
    """404 `unknown_checkpoint` if the job has no such checkpoint."""
    caller = await services.caller(request)
    await services.scheduler.call(m.GET_JOB, {"job": job, **caller.claim})
    await services.checkpoint_quota.delete(job, name)
