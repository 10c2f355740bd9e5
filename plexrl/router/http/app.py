"""The router's application: the HTTP door, errors as JSON, and the life of its parts."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from plexrl.errors import InvalidRequestError, PlexRLError
from plexrl.router.blobs.checkpoint_owners import CheckpointOwners
from plexrl.router.blobs.checkpoint_quota import CheckpointQuota
from plexrl.router.blobs.store import BlobStore
from plexrl.router.blobs.sweeping import discard_old_results, discard_orphans
from plexrl.router.blobs.upload_admission import Arrivals
from plexrl.router.config import RouterConfig
from plexrl.router.execution.executor import Executor
from plexrl.router.execution.public_errors import public_error
from plexrl.router.execution.scheduler_link import SchedulerLink
from plexrl.router.execution.specs import DeploymentSpecs
from plexrl.router.http.admission import BodyRefusedError, Door, closing
from plexrl.router.http.authentication import Callers
from plexrl.router.http.error_responses import error_response
from plexrl.router.http.gateway import Gateway
from plexrl.router.http.routes.cluster import cluster_routes
from plexrl.router.http.routes.jobs import deployment_routes, job_routes
from plexrl.router.http.routes.operations import operation_routes
from plexrl.router.http.routes.rollouts import rollout_routes
from plexrl.router.http.routes.streams import stream_routes
from plexrl.router.http.schemas import ErrorResponse
from plexrl.router.http.server.stopping import AskedAgain
from plexrl.router.observe.health import ClusterHealth
from plexrl.router.observe.metrics_log import MetricsLog
from plexrl.router.observe.spans import SpanSender

LOG = logging.getLogger(__name__)

DESCRIPTION = """Model execution for RL as a shared service. Operations are submitted, admitted by
the scheduler in its own order, and answered with a result or a reason to wait. Errors are
`{"error": {"code", "message", "details"}}` with a stable code. An answer with `Retry-After` asks
for the same request again, later: nothing is wrong with it."""


def make_app(config: RouterConfig) -> tuple[FastAPI, Gateway]:
    """The application and the parts behind it; its lifespan keeps them running."""
    gateway = _make_gateway(config)
    spans = None
    if config.otlp_endpoint is not None:
        place = Path(config.data_dir) / "spans.json"
        spans = SpanSender(gateway.scheduler, config.otlp_endpoint, place)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        del app
        running = [
            asyncio.create_task(gateway.scheduler.run()),
            asyncio.create_task(discard_old_results(gateway.blobs)),
            asyncio.create_task(discard_orphans(gateway.blobs, gateway.scheduler)),
        ]
        if spans is not None:
            running.append(asyncio.create_task(spans.run()))
        try:
            yield
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            await gateway.executor.close()

    app = FastAPI(
        title="PlexRL",
        description=DESCRIPTION,
        lifespan=lifespan,
        docs_url="/docs" if config.api_docs else None,
        redoc_url="/redoc" if config.api_docs else None,
        openapi_url="/openapi.json" if config.api_docs else None,
        responses={"4XX": {"model": ErrorResponse}, "5XX": {"model": ErrorResponse}},
    )
    app.add_middleware(AskedAgain)
    app.add_exception_handler(PlexRLError, _typed)
    app.add_exception_handler(RequestValidationError, _malformed)
    app.add_exception_handler(BodyRefusedError, _refused_body)
    app.add_exception_handler(Exception, _unexpected)
    app.add_middleware(
        Door,
        authenticate=gateway.caller,
        answer=_typed,
        bytes_max=config.json_bytes_max,
        timeout_s=config.body_timeout_s,
    )
    # They are tried in this order: an operation's id may have slashes, so what lies behind it comes
    # first; then the busiest.
    for routes in (
        *(stream_routes, rollout_routes, operation_routes),
        *(deployment_routes, job_routes, cluster_routes),
    ):
        app.include_router(routes(gateway))
    return app, gateway


def _make_gateway(config: RouterConfig) -> Gateway:
    data_dir = Path(config.data_dir)
    blobs = BlobStore(data_dir / "blobs")
    executor = Executor(blobs)
    callers = Callers()
    orders = {"run": executor.on_run, "abort": executor.on_abort, "discard": executor.on_discard}
    scheduler = SchedulerLink(
        config.scheduler,
        config.router,
        {**orders, "forget_callers": callers.on_forget},
        on_lost=callers.forget,
    )
    callers.scheduler = scheduler
    specs = DeploymentSpecs(scheduler)
    executor.scheduler = scheduler
    executor.specs = specs
    arrivals = Arrivals(config.arriving_bytes_max, config.tenant_arriving_bytes_max)
    metrics = MetricsLog(
        data_dir / "metrics",
        row_bytes_max=config.metrics_row_bytes_max,
        job_bytes_max=config.metrics_job_bytes_max,
    )
    owners = CheckpointOwners(scheduler, data_dir / "checkpoints")
    quota = CheckpointQuota(
        scheduler,
        data_dir / "checkpoints",
        config.router,
        checkpoints_max=config.tenant_checkpoints_max,
        bytes_max=config.tenant_checkpoint_bytes_max,
    )
    executor.checkpoint_quota = quota
    parts_file = None if config.parts_file is None else Path(config.parts_file)
    return Gateway(
        *(scheduler, executor, blobs, metrics, specs, arrivals, owners, quota, callers),
        health=ClusterHealth(scheduler, data_dir, parts_file),
        data_dir=data_dir,
        body_bytes_max=config.body_bytes_max,
    )


async def _typed(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, PlexRLError)
    is_operator = getattr(request.state, "is_operator", False)
    return error_response(error if is_operator else public_error(error))


async def _refused_body(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, BodyRefusedError)
    return closing(await _typed(request, error.cause))


async def _malformed(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    message = f"{where}: {first['msg']}"
    value = first.get("input")
    if isinstance(value, str | int | float):
        message += f"; it is {value!r:.100}"
    return await _typed(request, InvalidRequestError(message, where=where))


async def _unexpected(request: Request, error: Exception) -> JSONResponse:
    LOG.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return await _typed(request, PlexRLError("the router failed on this request: see its log"))
