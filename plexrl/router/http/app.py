"""The router's FastAPI application: its middleware, its error handlers and its background tasks."""

import asyncio
import logging
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import quote

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from plexrl.errors import InvalidRequestError, PlexRLError
from plexrl.router.blobs.directory import DirectoryBlobStore
from plexrl.router.blobs.garbage_collection import collect_orphans, collect_results
from plexrl.router.blobs.local_cache import LocalCache
from plexrl.router.blobs.objects import ObjectBlobStore
from plexrl.router.blobs.store import BlobStore
from plexrl.router.blobs.upload_admission import UploadAdmission
from plexrl.router.execution.deployment_specs import DeploymentSpecs
from plexrl.router.execution.engines import Engines
from plexrl.router.execution.executor import Executor
from plexrl.router.execution.rollout_link import RolloutLink
from plexrl.router.execution.scheduler_link import SchedulerLink
from plexrl.router.http.dashboard import login
from plexrl.router.http.dashboard import routes as dashboard
from plexrl.router.http.dashboard.stream import OverviewStreams
from plexrl.router.http.openai import routes as openai
from plexrl.router.http.openai.answers import error_body
from plexrl.router.http.routes import (
    asynchronous_rollouts,
    cluster,
    deployments,
    jobs,
    operations,
    rollouts,
    runs,
    streams,
    tenants,
)
from plexrl.router.http.schemas import ErrorResponse
from plexrl.router.job_files.captures import Captures
from plexrl.router.job_files.checkpoint_quota import CheckpointQuota
from plexrl.router.job_files.collection import collect_job_files
from plexrl.router.job_files.metrics_log import MetricsFiles, MetricsLog
from plexrl.router.job_files.metrics_objects import MetricsObjects
from plexrl.router.job_files.model_access import ModelAccess
from plexrl.router.job_files.record_store import RecordFiles, RecordObjects, RecordStore
from plexrl.router.job_files.samples import SampleLog
from plexrl.router.observe.audit_log import AuditLog
from plexrl.router.observe.health import ClusterHealth
from plexrl.router.observe.overview import Overviews
from plexrl.router.observe.rollouts import RolloutViews
from plexrl.router.observe.run_watch import RunWatch
from plexrl.router.observe.spans import SpanSender
from plexrl.router.server.config import RouterConfig
from plexrl.router.server.refused_keys import RefusedKeys
from plexrl.router.server.request_limits import BodyRefusedError, RequestLimits, close_after
from plexrl.router.services.access_table import needs_key
from plexrl.router.services.authentication import KeyCache
from plexrl.router.services.cancel_on_disconnect import CancelOnDisconnect
from plexrl.router.services.error_responses import error_for, error_response
from plexrl.router.services.guarded_route import include_guarded
from plexrl.router.services.quotes import Quotes
from plexrl.router.services.services import RouterServices
from plexrl.router.services.shutdown import RetryOnShutdown
from plexrl.statemanager.checkpoint.places.choice import root_at
from plexrl.storage.location import directory, is_url
from plexrl.storage.object_store import ObjectStore
from plexrl.wire.links.credentials import Credentials

LOG = logging.getLogger(__name__)

STORE_CALLS_MAX = 32
"""Requests that wait for an object store at a time, beside those for blobs."""

DESCRIPTION = """Model execution for RL as a shared service. Clients submit operations; the
scheduler admits them in its own order; a poll returns the result or the reason to wait. Errors are
`{"error": {"code", "message", "details"}}` with a stable code. A response with `Retry-After` means
that the request is correct: send the same request again later."""


def make_app(config: RouterConfig) -> tuple[FastAPI, RouterServices]:
    """Make the application and the services that its routes share; its lifespan runs the
    background tasks."""
    services = _make_services(config)
    spans = None
    if config.otlp_endpoint is not None:
        position_file = services.data_dir / "spans.json"
        spans = SpanSender(services.scheduler, config.otlp_endpoint, position_file)
    app = FastAPI(
        title="PlexRL",
        description=DESCRIPTION,
        lifespan=lambda _: _background_tasks(services, spans),
        docs_url="/docs" if config.api_docs else None,
        redoc_url="/redoc" if config.api_docs else None,
        openapi_url="/openapi.json" if config.api_docs else None,
        responses={"4XX": {"model": ErrorResponse}, "5XX": {"model": ErrorResponse}},
    )
    app.state.services = services
    app.state.overview_streams = OverviewStreams()
    app.add_middleware(RetryOnShutdown)
    app.add_exception_handler(PlexRLError, _plexrl_error)
    app.add_exception_handler(RequestValidationError, _invalid_request)
    app.add_exception_handler(BodyRefusedError, _refused_body)
    app.add_exception_handler(Exception, _unexpected_error)
    app.add_middleware(
        RequestLimits,
        authenticate=services.caller,
        needs_key=needs_key,
        error_response=_plexrl_error,
        bytes_max=config.json_bytes_max,
        timeout_s=config.body_timeout_s,
    )
    if find_spec("google") is not None and find_spec("google.protobuf") is not None:
        from plexrl.router.tinker.app import TinkerApi

        app.add_middleware(TinkerApi, services=services, timeout_s=config.body_timeout_s)
    # The outermost, so that it has each request as it came.
    app.add_middleware(
        AuditLog,
        data_dir=services.data_dir,
        router=config.router,
        bytes_max=config.audit_bytes_max,
        error_response=_plexrl_error,
    )
    # Starlette tries routes in this order. An operation's id may contain slashes, so longer paths
    # come before the path that ends with the id. After that the busiest come first.
    subjects = (
        *(openai, streams, rollouts, operations, asynchronous_rollouts, deployments, jobs, cluster),
        *(tenants, runs, login, dashboard),
    )
    include_guarded(app, *(subject.ROUTES for subject in subjects))
    return app, services


@asynccontextmanager
async def _background_tasks(
    services: RouterServices, spans: SpanSender | None
) -> AsyncIterator[None]:
    tasks = [
        asyncio.create_task(services.scheduler.run()),
        asyncio.create_task(collect_results(services.blobs)),
        asyncio.create_task(
            collect_job_files(services.captures, services.records, services.scheduler)
        ),
        asyncio.create_task(collect_orphans(services.blobs, services.scheduler)),
    ]
    if spans is not None:
        tasks.append(asyncio.create_task(spans.run()))
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await services.rollouts.close()
        await services.executor.close()
        # Waits for requests to the object store.
        await asyncio.to_thread(_close_stores, services)


def _make_services(config: RouterConfig) -> RouterServices:
    data_dir = Path(config.data_dir)
    checkpoint_url = config.checkpoint_url or str(data_dir / "checkpoints")
    threads = ThreadPoolExecutor(STORE_CALLS_MAX, thread_name_prefix="store-calls")
    blobs, metrics, records = _stores(config)
    credentials = None if config.tls is None else Credentials(config.tls)
    executor = Executor(blobs, credentials)
    refused = RefusedKeys(burst=config.refused_keys_burst, per_s=config.refused_keys_per_s)
    keys, rollouts = KeyCache(refused), RolloutLink(config.rollout, credentials)
    scheduler = SchedulerLink(
        config.scheduler,
        config.router,
        {
            **executor.handlers(),
            "forget_callers": keys.on_forget,
        },
        on_lost=keys.clear,
        credentials=credentials,
    )
    specs = DeploymentSpecs(scheduler)
    quota = CheckpointQuota(
        scheduler,
        root_at(checkpoint_url),
        config.router,
        checkpoints_max=config.tenant_checkpoints_max,
        bytes_max=config.tenant_checkpoint_bytes_max,
        threads=threads,
    )
    keys.scheduler = executor.scheduler = scheduler
    if config.oidc_file:
        from plexrl.router.services.oidc import Provider, read_oidc

        keys.provider = Provider(read_oidc(config.oidc_file))
    executor.specs = specs
    executor.checkpoint_quota = quota
    executor.watch = RunWatch(records, config.router, specs.cached, threads)
    parts_file = None if config.parts_file is None else Path(config.parts_file)
    health = ClusterHealth(scheduler, data_dir, parts_file, unreachable=executor.unreachable)
    return RouterServices(
        scheduler=scheduler,
        executor=executor,
        blobs=blobs,
        metrics=metrics,
        captures=Captures(records, job_bytes_max=config.captures_job_bytes_max),
        records=records,
        samples=SampleLog(records, job_bytes_max=config.samples_job_bytes_max),
        run_watch=executor.watch,
        specs=specs,
        uploads=UploadAdmission(config.arriving_bytes_max, config.tenant_arriving_bytes_max),
        model_access=ModelAccess(scheduler, checkpoint_url, config.model_roots),
        checkpoint_quota=quota,
        keys=keys,
        engines=Engines(executor),
        rollouts=rollouts,
        rollout_views=RolloutViews(rollouts),
        disconnects=CancelOnDisconnect(scheduler),
        health=health,
        overviews=Overviews(scheduler, health),
        quotes=Quotes(scheduler),
        data_dir=data_dir,
        threads=threads,
        body_bytes_max=config.body_bytes_max,
        runs_max=config.runs_max,
    )


def _stores(config: RouterConfig) -> tuple[BlobStore, MetricsLog, RecordStore]:
    bounds = {
        "row_bytes_max": config.metrics_row_bytes_max,
        "job_bytes_max": config.metrics_job_bytes_max,
    }
    shared = config.data_url or config.data_dir
    if not is_url(shared):
        folder = directory(shared)
        return (
            DirectoryBlobStore(folder / "blobs"),
            MetricsFiles(folder, **bounds),
            RecordFiles(folder),
        )
    cache = LocalCache(
        Path(config.data_dir) / "blob-cache" / quote(config.router, safe=""),
        config.blob_cache_bytes_max,
    )
    blobs = ObjectBlobStore(ObjectStore(shared), cache)
    metrics = MetricsObjects(ObjectStore(shared), config.router, **bounds)
    return blobs, metrics, RecordObjects(ObjectStore(shared))


def _close_stores(services: RouterServices) -> None:
    services.metrics.close()
    services.blobs.close()
    services.threads.shutdown(cancel_futures=True)


async def _plexrl_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, PlexRLError)
    shown = error_for(request, error)
    response = error_response(shown)
    if openai.is_endpoint(request.scope["path"]):
        response.body = response.render(error_body(shown))
        response.headers["content-length"] = str(len(response.body))
    return response


async def _refused_body(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, BodyRefusedError)
    return close_after(await _plexrl_error(request, error.cause))


async def _invalid_request(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    message = f"{where}: {first['msg']}"
    value = first.get("input")
    if isinstance(value, str | int | float):
        message += f"; it is {value!r:.100}"
    return await _plexrl_error(request, InvalidRequestError(message, where=where))


async def _unexpected_error(request: Request, error: Exception) -> JSONResponse:
    LOG.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return await _plexrl_error(
        request, PlexRLError("the router failed on this request: see its log")
    )
