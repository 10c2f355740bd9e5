"""Routes about operations: submit, wait, acknowledge, cancel, list."""

import asyncio
import hashlib
import json
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from plexrl.errors import (
    ConflictError,
    InvalidRequestError,
    JournalFullError,
    NotFoundError,
    OverloadedError,
    QuotaExceededError,
    from_wire,
)
from plexrl.ids import BlobRef
from plexrl.model.deployment_spec import DeploymentSpec
from plexrl.router.blobs.store import (
    INLINE_BYTES_MAX,
    PAYLOAD_SUFFIX,
    Upload,
    digested_ref,
)
from plexrl.router.http.operation_checks import CheckedOperation, check_operation, check_source
from plexrl.router.http.schemas import Limited, StopRowsRequest
from plexrl.router.http.view_route import ViewRoute
from plexrl.router.services.authentication import Caller
from plexrl.router.services.error_responses import final_response
from plexrl.router.services.services import RouterServices, Services
from plexrl.wire import scheduler_methods as m
from plexrl.wire.messages.views import ExplanationView, FailureView, Operations, OperationView
from plexrl.wire.operations import (
    CheckpointParams,
    GenerateParams,
    OperationParams,
    OperationState,
    SyncWeightsParams,
)
from plexrl.wire.parameter_checks import check_identifier
from plexrl.wire.tensors import (
    MEDIA_TYPE,
    Arrays,
    Body,
    decode_body,
    encode_body,
    with_params,
)

WAIT_S_MAX = 60.0
SLICE_BYTES = 256 << 10
"""Bytes of a large result that are passed to the server at a time."""
REFUSALS = (
    *(ConflictError, InvalidRequestError, NotFoundError, OverloadedError, QuotaExceededError),
    JournalFullError,
)
"""Errors after which an operation was certainly not accepted."""
BINARY = {
    "description": "safetensors; `params` are JSON in its metadata",
    "content": {MEDIA_TYPE: {}},
}
SUBMIT_BODY = {
    "requestBody": {
        "content": {
            MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}},
            "application/json": {"schema": {"type": "object"}},
        }
    }
}

ROUTES = APIRouter(prefix="/v1", tags=["operations"], route_class=ViewRoute)


@ROUTES.post(
    "/jobs/{job}/deployments/{name}/operations/{kind}",
    status_code=202,
    summary="Submit an operation",
    openapi_extra=SUBMIT_BODY,
)
async def submit(
    request: Request,
    services: Services,
    job: str,
    name: str,
    kind: str,
    operation: str,
    deadline_s: Annotated[float | None, Limited("page", "deadline_s", in_query=True)] = None,
) -> OperationView:
    """The body is a safetensors file: its tensors are the batch, and its metadata key `plexrl`
    holds the parameters as JSON. Without a batch the body may be JSON.

    `operation` is the idempotency key: the same request again is the same operation. An operation
    that has not begun `deadline_s` seconds after it was accepted ends with 504 `deadline_exceeded`
    and never runs. A 429 estimates in `Retry-After` when there is capacity.
    """
    caller = await services.caller(request)
    check_identifier("operation", operation)
    deployment = f"{job}/{name}"
    spec = await services.spec(deployment, caller)
    async with services.upload(request, caller) as upload:
        checked = await _check(request, spec, kind, upload)
        if isinstance(checked.params, SyncWeightsParams):
            check_source(spec, await services.spec(checked.params.source, caller))
        if isinstance(checked.params, CheckpointParams) and checked.params.job is not None:
            await services.check_job(caller, checked.params.job)
        named = {"operation": operation, "deployment": deployment, "deadline_s": deadline_s}
        return await submit_checked(services, {**named, **caller.claim}, checked, upload)


@ROUTES.get(
    "/operations/{operation:path}",
    summary="Wait for an operation's result",
    responses={200: BINARY},
    response_class=Response,
)
async def wait(
    request: Request,
    services: Services,
    operation: str,
    wait_s: Annotated[float, Limited("page", "wait_s", in_query=True)] = 25.0,
) -> Response:
    """200 with the result; 202 with the reason while the operation is unfinished; else the
    operation's own error, without `Retry-After`.

    A response with `Retry-After` does not describe the operation: send the same request again.
    """
    caller = await services.caller(request)
    view = await services.operation(caller, operation, min(wait_s, WAIT_S_MAX))
    if not OperationState(view["state"]).is_final:
        if (unstored := services.executor.unstored_reason(operation)) is not None:
            view["explanation"] = held_explanation(held_reason(unstored, caller))
        return JSONResponse(view, status_code=202)
    if view["state"] != OperationState.FINISHED:
        return final_response(from_wire(view["error"]))
    params = {"operation": view, "result": json.loads(view["result_json"])}
    if view["result"] is None:
        return Response(encode_body(params), media_type=MEDIA_TYPE)
    body = await services.blobs.read(BlobRef(view["result"]))
    return _in_slices(with_params(body, params))


@ROUTES.post(
    "/operations/{operation:path}/acknowledge",
    summary="Acknowledge an operation's failure",
)
async def acknowledge(request: Request, services: Services, operation: str) -> FailureView:
    """A failed `forward_backward`, `optim_step`, `zero_grad`, `load_checkpoint` or `sync_weights`
    halts its deployment: further operations of these kinds, checkpoints and syncs from the
    deployment get 409 `earlier_failure`. Acknowledging that operation, or one that failed because
    of it, ends the halt.

    Acknowledging an operation that has not failed changes nothing. `failure` is the job's next
    failure to acknowledge.
    """
    return await services.ask(request, m.ACKNOWLEDGE, operation=operation)


@ROUTES.delete("/operations/{operation:path}", summary="Cancel an operation")
async def cancel(request: Request, services: Services, operation: str) -> OperationView:
    """A pending operation never runs. A running generation ends with the tokens drawn so far."""
    return await services.ask(request, m.CANCEL_OPERATION, operation=operation)


@ROUTES.post("/operations/{operation:path}/stop-rows", summary="Stop rows of a generation")
async def stop_rows(
    request: Request, services: Services, operation: str, body: StopRowsRequest
) -> OperationView:
    """The named rows end with the tokens that they have and finish reason `abort`; others go on.
    Rows count from 0 over all prompts. A row that has ended stays as it is.

    The request is kept with the operation: rows of a pending one draw nothing, also if it is
    pending because its workers were lost and its run is repeated.
    """
    rows = sorted(set(body.rows))
    return await services.ask(request, m.CANCEL_OPERATION, operation=operation, rows=rows)


@ROUTES.get("/operations", summary="Finished operations after index `after`")
async def log(
    request: Request,
    services: Services,
    job: str | None = None,
    deployment: str | None = None,
    kind: str | None = None,
    after: Annotated[int, Limited("page", "after", in_query=True)] = 0,
    limit: Annotated[int, Limited("page", "limit", in_query=True)] = 1000,
) -> Operations:
    """Oldest first, the scheduler's own moves of state included, with the time each phase took:
    `queue_s`, `switch_s`, `transfer_s`, `compute_s`.

    The scheduler keeps as many as its `history` setting allows.
    """
    fields = {"job": job, "deployment": deployment, "kind": kind, "after": after, "limit": limit}
    return await services.ask(request, m.LIST_OPERATIONS, **fields)


def held_explanation(reason: str) -> ExplanationView:
    """Explanation of an operation whose result cannot be stored yet."""
    return {
        "reason": reason,
        "rule": "held",
        "holder": None,
        "eta_s": None,
        "eta_low_s": None,
        "eta_high_s": None,
        "position": 0,
    }


def held_reason(unstored: str, caller: Caller) -> str:
    """Why a result is not available yet. Only operators see where it is stored."""
    reason = "the operation has run; its result waits for the cluster's storage"
    return f"{reason}: {unstored}" if caller.sees_all else reason


def _in_slices(parts: Sequence[Body]) -> Response:
    """A response that copies at most one slice of a large body at a time."""
    views = [memoryview(part).cast("B") for part in parts]
    size = sum(view.nbytes for view in views)
    if size <= INLINE_BYTES_MAX:
        return Response(b"".join(views), media_type=MEDIA_TYPE)

    async def slices() -> AsyncIterator[memoryview]:
        for view in views:
            for start in range(0, view.nbytes, SLICE_BYTES):
                yield view[start : start + SLICE_BYTES]

    headers = {"content-length": str(size)}
    return StreamingResponse(slices(), headers=headers, media_type=MEDIA_TYPE)


async def _check(
    request: Request, spec: DeploymentSpec, kind: str, upload: Upload
) -> CheckedOperation:
    """Check the request; a large batch is checked in a thread."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip()

    def check() -> CheckedOperation:
        params, arrays = _decode(media_type, upload.body)
        return check_operation(spec, kind, params, arrays)

    if memoryview(upload.body).nbytes <= INLINE_BYTES_MAX:
        return check()
    return await asyncio.to_thread(check)


def _decode(media_type: str, body: Body) -> tuple[dict[str, Any], Arrays]:
    if media_type == MEDIA_TYPE:
        return decode_body(body)
    if media_type in ("application/json", ""):
        try:
            return msgspec.json.decode(body or b"{}", type=dict[str, Any]), {}
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError(
                f"the body is not a JSON object: {error}: send the parameters as one"
            ) from error
    raise InvalidRequestError(f"content type {media_type!r}: send {MEDIA_TYPE} or application/json")


async def submit_checked(
    services: RouterServices, fields: Mapping[str, Any], checked: CheckedOperation, upload: Upload
) -> OperationView:
    """Have a checked operation accepted: its payload is durable, and then it is journalled."""
    operation: str = fields["operation"]
    params = _with_seed(checked.params, operation)
    sync = params if isinstance(params, SyncWeightsParams) else None
    payload: BlobRef | None = None
    if checked.has_batch:
        # A unique name, so that no other request, refused or repeated, can discard this payload.
        stem = f"{operation}.{uuid.uuid4().hex[:16]}"
        payload = digested_ref(stem, upload.digest, PAYLOAD_SUFFIX)
        await services.blobs.publish(upload, payload)
    submitting: asyncio.Task[OperationView] = asyncio.create_task(
        services.scheduler.call(
            m.SUBMIT_OPERATION,
            {
                **fields,
                "kind": checked.kind.value,
                "params": params,
                "payload": payload,
                "payload_bytes": 0 if payload is None else memoryview(upload.body).nbytes,
                "payload_digest": "" if payload is None else upload.digest,
                "tokens": checked.tokens,
                "source": None if sync is None else sync.source,
                "in_flight": sync is not None and (sync.in_flight or sync.ahead),
                "published": sync is not None and sync.published,
            },
        )
    )
    if payload is None or params is None:
        return await submitting
    # The request leaves first, so that the payload is on its way while the journal commits.
    await asyncio.sleep(0)
    services.executor.transfer_early(fields["deployment"], params, payload, upload.body)
    accepted = None
    try:
        view = await submitting
        accepted = view["payload"]
    except REFUSALS:
        services.blobs.discard(payload)
        raise
    finally:
        if accepted != payload:
            services.executor.discard_early(fields["deployment"], payload)
    if accepted != payload:
        # The operation was accepted before, with an earlier copy of the payload.
        services.blobs.discard(payload)
    return view


def _with_seed(params: OperationParams | None, operation: str) -> OperationParams | None:
    """Give a generation without a seed one that follows from the operation's id.

    The seed is journalled, so a repeated dispatch draws the same tokens. Since it follows from the
    id, a repeated request is equal to the first.
    """
    if not isinstance(params, GenerateParams) or params.sampling.seed is not None:
        return params
    digest = hashlib.sha256(operation.encode()).digest()
    seed = int.from_bytes(digest[:7], "little")
    return msgspec.structs.replace(params, sampling=replace(params.sampling, seed=seed))
