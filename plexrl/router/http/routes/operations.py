"""Routes about operations: submit, wait, cancel, look back."""

import asyncio
import hashlib
import json
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from plexrl.errors import (
    ConflictError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    QuotaExceededError,
    from_wire,
)
from plexrl.ids import BlobRef
from plexrl.model.deployment_spec import DeploymentSpec
from plexrl.router.blobs.store import INLINE_BYTES_MAX, PAYLOAD_SUFFIX, Upload
from plexrl.router.http.authentication import Caller
from plexrl.router.http.error_responses import final_response
from plexrl.router.http.gateway import FINAL, Gateway
from plexrl.router.http.validation import Checked, check_operation, check_source
from plexrl.wire.operations import (
    CheckpointParams,
    GenerateParams,
    SyncWeightsParams,
    encode_params,
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

Plain = dict[str, Any]

WAIT_S_MAX = 60.0
HELD: Plain = {"rule": "held", "holder": None, "eta_s": None, "position": 0}
"""Explanation of an operation whose result cannot be stored now; the reason comes with it."""
SLICE_BYTES = 256 << 10
"""Of a large result, handed to the server at a time."""
REFUSALS = (
    *(ConflictError, InvalidRequestError, NotFoundError, OverloadedError, QuotaExceededError),
)
"""After which an operation was surely not accepted."""
BINARY = {
    "description": "safetensors; `params` are JSON in its metadata",
    "content": {MEDIA_TYPE: {}},
}


def operation_routes(gateway: Gateway) -> APIRouter:
    """All routes about operations, but for streams."""
    routes = APIRouter(prefix="/v1", tags=["operations"])

    @routes.post(
        "/jobs/{job}/deployments/{name}/operations/{kind}",
        status_code=202,
        summary="Submit an operation",
        description="The body is a safetensors file whose metadata key `plexrl` holds the "
        "parameters as JSON and whose tensors are the batch, or JSON where there is no batch. "
        "`operation` is the idempotency key: the same request again is the same operation. One "
        "that has not begun `deadline_s` seconds after it was accepted ends with 504 "
        "`deadline_exceeded` and never runs. 429 says in `Retry-After` when there should be room.",
        openapi_extra={
            "requestBody": {
                "content": {
                    MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}},
                    "application/json": {"schema": {"type": "object"}},
                }
            }
        },
    )
    async def submit(
        request: Request,
        job: str,
        name: str,
        kind: str,
        operation: str,
        deadline_s: float | None = None,
    ) -> Plain:
        caller = await gateway.caller(request)
        check_identifier("operation", operation)
        spec = await gateway.spec(f"{job}/{name}", caller)
        async with gateway.body(request, caller) as upload:
            checked = await _checked(request, spec, kind, upload)
            if isinstance(checked.params, SyncWeightsParams):
                source = await gateway.spec(checked.params.source, caller)
                check_source(spec, source)
            if isinstance(checked.params, CheckpointParams) and checked.params.job is not None:
                job_named = checked.params.job
                await gateway.checkpoint_owners.check_job(job_named, caller.rights)
            named = {"operation": operation, "deployment": f"{job}/{name}"}
            fields = {**named, "deadline_s": deadline_s, **caller.claim}
            return await _submit(gateway, fields, checked, upload)

    @routes.get(
        "/operations/{operation:path}",
        summary="Wait for an operation's result",
        description="200 with the result; 202 while it is not there, with the reason; the "
        "operation's own error otherwise. That has no `Retry-After`: an answer with one says "
        "nothing about the operation, and asks for the same request again.",
        responses={200: BINARY},
        response_class=Response,
    )
    async def wait(request: Request, operation: str, wait_s: float = 25.0) -> Response:
        caller = await gateway.caller(request)
        view = await gateway.operation(caller, operation, max(0.0, min(wait_s, WAIT_S_MAX)))
        if view["state"] not in FINAL:
            if (held := gateway.executor.held(operation)) is not None:
                reason = held_reason(held, caller)
                view["explanation"] = {**(view["explanation"] or {}), **HELD, "reason": reason}
            return JSONResponse(view, status_code=202)
        if view["state"] != "finished":
            return final_response(from_wire(view["error"]))
        params = {"operation": view, "result": json.loads(view["result_json"])}
        if view["result"] is None:
            return Response(encode_body(params), media_type=MEDIA_TYPE)
        body = await gateway.blobs.read(BlobRef(view["result"]))
        return _in_slices(with_params(body, params))

    @routes.post(
        "/operations/{operation:path}/acknowledge",
        summary="Take note of an operation's failure",
        description="After a failed `forward_backward`, `optim_step`, `zero_grad`, "
        "`load_checkpoint` or `sync_weights` such operations of its deployment, checkpoints and "
        "syncs from it get 409 `earlier_failure` until this is called for the operation, or for "
        "one that failed of it. Of an operation that has not failed it changes nothing. `failure` "
        "is what is left to acknowledge of the job.",
    )
    async def acknowledge(request: Request, operation: str) -> Plain:
        caller = await gateway.caller(request)
        return await gateway.scheduler.call("acknowledge", {"operation": operation, **caller.claim})

    @routes.delete(
        "/operations/{operation:path}",
        summary="Cancel a waiting operation, or end a running generation with what it has",
    )
    async def cancel(request: Request, operation: str) -> Plain:
        caller = await gateway.caller(request)
        fields = {"operation": operation, **caller.claim}
        return await gateway.scheduler.call("cancel_operation", fields)

    @routes.get(
        "/operations",
        summary="Finished operations behind index `after`",
        description="Oldest first, the scheduler's own moves of state included, with where their "
        "time went: `queue_s`, `switch_s`, `transfer_s`, `compute_s`. As many are remembered as "
        "the scheduler's `history` says.",
    )
    async def log(
        request: Request,
        job: str | None = None,
        deployment: str | None = None,
        kind: str | None = None,
        after: int = 0,
        limit: int = 1000,
    ) -> Plain:
        caller = await gateway.caller(request)
        fields = {**caller.claim, "job": job, "deployment": deployment, "kind": kind}
        fields |= {"after": after, "limit": limit}
        return await gateway.scheduler.call("list_operations", fields)

    return routes


def held_reason(held: str, caller: Caller) -> str:
    """Why a result is not there yet; where it is to be stored is the operator's business."""
    reason = "it was carried out, and its result waits for room"
    return f"{reason}: {held}" if caller.is_operator else f"{reason} on the cluster's disk"


def _in_slices(parts: Sequence[Body]) -> Response:
    """A response that copies no more than a slice of a large body at a time."""
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


async def _checked(request: Request, spec: DeploymentSpec, kind: str, upload: Upload) -> Checked:
    """The request, if it can be carried out. Looking over a large batch is a thread's work."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip()

    def check() -> Checked:
        params, arrays = _decode(media_type, upload.body)
        return check_operation(spec, kind, params, arrays)

    if memoryview(upload.body).nbytes <= INLINE_BYTES_MAX:
        return check()
    return await asyncio.to_thread(check)


def _decode(media_type: str, body: Body) -> tuple[Plain, Arrays]:
    if media_type == MEDIA_TYPE:
        return decode_body(body)
    if media_type in ("application/json", ""):
        try:
            return msgspec.json.decode(body or b"{}", type=dict[str, Any]), {}
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError(f"the body is no JSON object: {error}") from error
    raise InvalidRequestError(f"content type {media_type!r}: send {MEDIA_TYPE} or application/json")


async def _submit(gateway: Gateway, fields: Plain, checked: Checked, upload: Upload) -> Plain:
    operation: str = fields["operation"]
    params = checked.params
    if isinstance(params, GenerateParams) and params.sampling.seed is None:
        # Drawn once and journalled, so that a repeated dispatch draws the same tokens. It follows
        # from the operation's id, so that a repeated request is the same request.
        drawn = hashlib.sha256(operation.encode()).digest()
        seed = int.from_bytes(drawn[:7], "little")
        params = replace(params, sampling=replace(params.sampling, seed=seed))
    source = params.source if isinstance(params, SyncWeightsParams) else None
    payload: BlobRef | None = None
    if checked.has_batch:
        # A name of this request's own, so that no other one, refused or repeated, can discard it.
        payload = BlobRef(f"{operation}.{uuid.uuid4().hex[:16]}{PAYLOAD_SUFFIX}")
        await gateway.blobs.publish(upload, payload)
    try:
        view = await gateway.scheduler.call(
            "submit_operation",
            {
                **fields,
                "kind": checked.kind.value,
                "params_json": encode_params(params),
                "payload": payload,
                "payload_bytes": 0 if payload is None else memoryview(upload.body).nbytes,
                "payload_digest": "" if payload is None else upload.digest,
                "tokens": checked.tokens,
                "source": source,
                "in_flight": isinstance(params, SyncWeightsParams) and params.in_flight,
            },
        )
    except REFUSALS:
        if payload is not None:
            gateway.blobs.discard(payload)
        raise
    if payload is not None and view["payload"] != payload:
        # Accepted before, under the name that the payload had then.
        gateway.blobs.discard(payload)
    return view
