"""Routes of sessions, of their settings, and of what the server has."""

import asyncio
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from plexrl.errors import NotFoundError
from plexrl.model.architecture.families import ARCHITECTURES
from plexrl.model.spec import ModelSpec
from plexrl.router.tinker.messages.codec import PROTOBUF
from plexrl.router.tinker.messages.requests import (
    CreateSession,
    FinishSession,
    FutureName,
    SessionName,
)
from plexrl.router.tinker.records import FutureRecord, ModelRecord, SamplerRecord, SessionRecord
from plexrl.router.tinker.routes.client import Limit, Offset, TinkerClient, TinkerRoute

ROUTES = APIRouter(route_class=TinkerRoute)
NOTICE = (
    "PlexRL: LoRA adapters are in attention and MLP layers; train_unembed adds none. What works, "
    "differs or is refused stands in docs/tinker.md."
)
OUTCOMES = {"success": "completed", "errored": "failed", "interrupted": "cancelled"}
SAMPLES_AT_ONCE = 1024
"""Samples that a client sends at a time; each one's poll holds a connection."""
DEPTH = 2
"""Base models have names of so many parts at most, as `org/name`."""


@ROUTES.post("/client/config")
async def config(client: TinkerClient) -> dict[str, Any]:
    """Settings of the SDK; those that are absent have its defaults."""
    del client
    # Not `sample_use_retrieve_futures`: a client with it has no bound on its samples, so that more
    # than a deployment's queue holds are refused with 429, after which it slows down for 10 s.
    return {"sample_max_concurrent_requests": SAMPLES_AT_ONCE}


@ROUTES.post("/client/dynamic_config")
async def dynamic_config(client: TinkerClient) -> dict[str, Any]:
    """Settings that the SDK reads again."""
    del client
    return {
        "refresh_interval_sec": 300,
        "sample_cancel_enabled": True,
        "sample_cancel_max_batch_size": 64,
    }


@ROUTES.get("/healthz")
async def health(client: TinkerClient) -> dict[str, str]:
    """The router serves."""
    del client
    return {"status": "ok"}


@ROUTES.post("/telemetry")
async def telemetry(client: TinkerClient) -> dict[str, str]:
    """Events of the SDK; they are dropped."""
    await client.body()
    return {"status": "accepted"}


@ROUTES.get("/get_server_capabilities")
async def capabilities(client: TinkerClient) -> dict[str, Any]:
    """The base models below the caller's roots."""
    roots = await client.sessions.roots(client.caller)
    return {"supported_models": await asyncio.to_thread(_base_models, roots)}


def _base_models(roots: tuple[str, ...]) -> list[dict[str, Any]]:
    found = {}
    for root in map(Path, roots):
        for depth in range(1, DEPTH + 1):
            for file in sorted(root.glob("/".join(["*"] * depth + ["config.json"]))):
                config = ModelSpec(path=str(file.parent)).config
                if config.get("model_type") in ARCHITECTURES:
                    name = str(file.parent.relative_to(root))
                    found[name] = config.get("max_position_embeddings")
    return [
        {
            "model_name": name,
            "max_context_length": length,
            "trainable": True,
            "sampleable": True,
        }
        for name, length in found.items()
    ]


@ROUTES.post("/create_session")
async def create(client: TinkerClient) -> dict[str, Any]:
    """Begin a session: a job of the scheduler."""
    asked = await client.read(CreateSession)
    retry = client.request.headers.get("x-idempotency-key", "")
    session = await client.sessions.begin(client.key, client.caller, asked, retry)
    return {"type": "create_session", "session_id": session, "info_message": NOTICE}


@ROUTES.post("/session_heartbeat")
async def heartbeat(client: TinkerClient) -> dict[str, Any]:
    """The client lives. 410 once its session has ended."""
    asked = await client.read(SessionName)
    await client.sessions.beat(client.key, client.session(asked.session_id))
    return {"type": "session_heartbeat"}


@ROUTES.post("/sessions/{session}/finish", status_code=204)
async def finish(client: TinkerClient, session: str) -> None:
    """End a session and release its GPUs. The first reason wins."""
    asked = await client.read(FinishSession)
    found = client.sessions.find(SessionRecord, session, client.caller)
    outcome = OUTCOMES[asked.reason.type]
    await client.sessions.finish(client.key, found, outcome, asked.detail or "")


@ROUTES.get("/sessions")
async def sessions(client: TinkerClient, limit: Limit = 20, offset: Offset = 0) -> dict[str, Any]:
    """The caller's sessions, newest first."""
    found = client.sessions.owned(SessionRecord, client.caller)
    return {"sessions": [each.id for each in found[offset : offset + limit]]}


@ROUTES.get("/sessions/{session}")
async def session(client: TinkerClient, session: str) -> dict[str, Any]:
    """The models and samplers of a session."""
    found = client.sessions.find(SessionRecord, session, client.caller)
    records = client.sessions.records
    return {
        "training_run_ids": [each.id for each in records.all(ModelRecord, found.id)],
        "sampler_ids": [each.id for each in records.all(SamplerRecord, found.id)],
    }


@ROUTES.post("/retrieve_future")
async def retrieve(client: TinkerClient) -> Response:
    """A request's result, or why it waits. 410: the request is lost, and must be sent again."""
    asked = await client.read(FutureName)
    try:
        future = client.sessions.find(FutureRecord, asked.request_id, client.caller)
        answer = await client.sessions.futures.poll(client.key, future)
    except NotFoundError as error:
        return JSONResponse({"error": error.message}, status_code=410)
    if answer.json is not None:
        return JSONResponse(dict(answer.json))
    return Response(answer.protobuf, media_type=PROTOBUF)


@ROUTES.post("/cancel_future", status_code=204)
async def cancel(client: TinkerClient) -> None:
    """Stop a generation whose result nobody wants."""
    asked = await client.read(FutureName)
    future = client.sessions.find(FutureRecord, asked.request_id, client.caller)
    if future.operation:
        await client.sessions.api.call(client.key, "DELETE", f"/v1/operations/{future.operation}")
