"""Routes about operations: submit, wait, cancel, look back."""

import asyncio
import hashlib
import json
from dataclasses import replace
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from plexrl.errors import InvalidRequestError, from_wire
from plexrl.ids import BlobRef
from plexrl.router.gateway import FINAL, Caller, Gateway
from plexrl.router.validation import Checked, check_identifier, check_operation
from plexrl.wire.operations import GenerateParams, SyncWeightsParams
from plexrl.wire.tensors import MEDIA_TYPE, Arrays, decode_body, encode_body

Plain = dict[str, Any]

WAIT_S_MAX = 60.0
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
        "`operation` is the idempotency key: the same request again is the same operation.",
        openapi_extra={
            "requestBody": {
                "content": {
                    MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}},
                    "application/json": {"schema": {"type": "object"}},
                }
            }
        },
    )
    async def submit(request: Request, job: str, name: str, kind: str, operation: str) -> Plain:
        caller = await gateway.caller(request)
        check_identifier("operation", operation)
        spec = await gateway.spec(f"{job}/{name}", caller)
        body = await gateway.body(request)
        params, arrays = _decode(request, body)
        checked = check_operation(spec, kind, params, arrays)
        return await _submit(gateway, caller, f"{job}/{name}", operation, checked, body, arrays)

    @routes.get(
        "/operations/{operation:path}",
        summary="Wait for an operation's result",
        description="200 with the result; 202 while it is not there, with the reason; the "
        "operation's own error otherwise.",
        responses={200: BINARY},
        response_class=Response,
    )
    async def wait(request: Request, operation: str, wait_s: float = 25.0) -> Response:
        caller = await gateway.caller(request)
        view = await gateway.operation(caller, operation, max(0.0, min(wait_s, WAIT_S_MAX)))
        if view["state"] not in FINAL:
            return JSONResponse(view, status_code=202)
        if view["state"] != "finished":
            raise from_wire(view["error"])
        arrays: Arrays = {}
        if view["result"] is not None:
            _, arrays = decode_body(await gateway.blobs.read(BlobRef(view["result"])))
        result = json.loads(view["result_json"])
        content = encode_body({"operation": view, "result": result}, arrays)
        return Response(content, media_type=MEDIA_TYPE)

    @routes.delete(
        "/operations/{operation:path}",
        summary="Cancel a waiting operation, or end a running generation with what it has",
    )
    async def cancel(request: Request, operation: str) -> Plain:
        caller = await gateway.caller(request)
        fields = {"operation": operation, **caller.claim}
        return await gateway.scheduler.call("cancel_operation", fields)

    @routes.get("/operations", summary="Finished operations behind index `after`")
    async def log(
        request: Request, job: str | None = None, after: int = 0, limit: int = 1000
    ) -> Plain:
        caller = await gateway.caller(request)
        fields = {**caller.claim, "job": job, "after": after, "limit": limit}
        return await gateway.scheduler.call("list_operations", fields)

    return routes


def _decode(request: Request, body: bytes) -> tuple[Plain, Arrays]:
    kind = request.headers.get("content-type", "").partition(";")[0].strip()
    if kind == MEDIA_TYPE:
        return decode_body(body)
    if kind in ("application/json", ""):
        try:
            return msgspec.json.decode(body or b"{}", type=dict[str, Any]), {}
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError(f"the body is no JSON object: {error}") from error
    raise InvalidRequestError(f"content type {kind!r}: send {MEDIA_TYPE} or application/json")


async def _submit(
    gateway: Gateway,
    caller: Caller,
    deployment: str,
    operation: str,
    checked: Checked,
    body: bytes,
    arrays: Arrays,
) -> Plain:
    params = checked.params
    if isinstance(params, GenerateParams) and params.sampling.seed is None:
        # Drawn once and journalled, so that a repeated dispatch draws the same tokens. It follows
        # from the operation's id, so that a repeated request is the same request.
        drawn = hashlib.sha256(operation.encode()).digest()
        seed = int.from_bytes(drawn[:7], "little")
        params = replace(params, sampling=replace(params.sampling, seed=seed))
    source = params.source if isinstance(params, SyncWeightsParams) else None
    payload: str | None = None
    if arrays:
        # Named by its content too, so that another batch under the same id is a conflict.
        digest = (await asyncio.to_thread(hashlib.sha256, body)).hexdigest()
        payload = f"{operation}.{digest[:16]}.in"
        await gateway.blobs.write(BlobRef(payload), body)
    return await gateway.scheduler.call(
        "submit_operation",
        {
            "operation": operation,
            "deployment": deployment,
            **caller.claim,
            "kind": checked.kind.value,
            "params_json": msgspec.json.encode(params).decode(),
            "payload": payload,
            "tokens": checked.tokens,
            "source": source,
        },
    )
