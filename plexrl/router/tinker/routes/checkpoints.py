"""Routes of saved weights: lists, deletion, time to live."""

import time
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter

from plexrl.errors import InvalidRequestError
from plexrl.router.tinker.messages.requests import PathName, Ttl
from plexrl.router.tinker.records import ModelRecord, WeightsRecord
from plexrl.router.tinker.routes.client import Client, Limit, Offset, TinkerClient, TinkerRoute

ROUTES = APIRouter(route_class=TinkerRoute)
KINDS = {"weights": "training", "sampler_weights": "sampler"}
REFUSED = {
    "save_weights_external": "save_state, and job.download_checkpoint of PlexRL's SDK",
    "copy_weights": "the path as it is: it stays readable after its session has ended",
    "create_custom_loss": "forward_backward_custom with a function, which runs in the client",
    "join_sampling_session": "a sampling client of each process",
}
"""Routes that the SDK has and PlexRL has not, and what to use instead."""


@ROUTES.post("/weights_info")
async def weights_info(client: TinkerClient) -> dict[str, Any]:
    """Base model and adapters of saved weights."""
    asked = await client.read(PathName)
    weights = client.sessions.weights(asked.tinker_path, client.caller)
    model = client.sessions.find(ModelRecord, weights.model, client.caller)
    return {
        "base_model": model.base_model,
        "is_lora": model.lora is not None,
        "lora_rank": None if model.lora is None else model.lora["rank"],
        "train_unembed": False,
        "train_mlp": model.trains_mlp,
        "train_attn": model.trains_attention,
    }


@ROUTES.get("/training_runs")
async def runs(client: TinkerClient, limit: Limit = 20, offset: Offset = 0) -> dict[str, Any]:
    """The caller's models, newest first."""
    found = client.sessions.owned(ModelRecord, client.caller)
    page = [_run(client, each) for each in found[offset : offset + limit]]
    cursor = {"offset": offset, "limit": limit, "total_count": len(found)}
    return {"training_runs": page, "cursor": cursor}


@ROUTES.get("/training_runs/{run}")
async def run(client: TinkerClient, run: str) -> dict[str, Any]:
    """One model."""
    return _run(client, client.sessions.find(ModelRecord, run, client.caller))


@ROUTES.get("/training_runs/{run}/checkpoints")
async def checkpoints(client: TinkerClient, run: str) -> dict[str, Any]:
    """The saved weights of a model."""
    model = client.sessions.find(ModelRecord, run, client.caller)
    return {"checkpoints": [_checkpoint(weights) for weights in _weights_of(client, model)]}


@ROUTES.get("/checkpoints")
async def all_checkpoints(
    client: TinkerClient, limit: Limit = 100, offset: Offset = 0
) -> dict[str, Any]:
    """The caller's saved weights, newest first."""
    found = client.sessions.owned(WeightsRecord, client.caller)
    page = [_checkpoint(each) for each in found[offset : offset + limit]]
    cursor = {"offset": offset, "limit": limit, "total_count": len(found)}
    return {"checkpoints": page, "cursor": cursor}


@ROUTES.delete("/training_runs/{run}/checkpoints/{kind}/{name}", status_code=204)
async def delete(client: TinkerClient, run: str, kind: str, name: str) -> None:
    """Delete saved weights."""
    weights = client.sessions.find(WeightsRecord, f"tinker://{run}/{kind}/{name}", client.caller)
    await client.sessions.delete(client.key, weights)


@ROUTES.put("/training_runs/{run}/checkpoints/{kind}/{name}/ttl", status_code=204)
async def set_ttl(client: TinkerClient, run: str, kind: str, name: str) -> None:
    """Set the time to live of saved weights, from now on."""
    asked = await client.read(Ttl)
    weights = client.sessions.find(WeightsRecord, f"tinker://{run}/{kind}/{name}", client.caller)
    ttl_s = asked.ttl_seconds
    weights.expires_at = None if ttl_s is None else time.time() + ttl_s
    client.sessions.records.put(weights)


@ROUTES.api_route("/{path:path}", methods=["GET", "POST", "PUT", "DELETE", "PATCH"])
async def refuse(client: TinkerClient, path: str) -> None:
    """All other routes of the SDK."""
    del client
    instead = REFUSED.get(path)
    hint = f": use {instead}" if instead else ": docs/tinker.md lists what it has"
    raise InvalidRequestError(f"PlexRL has no {path}{hint}")


def _weights_of(client: Client, model: ModelRecord) -> list[WeightsRecord]:
    found = client.sessions.records.all(WeightsRecord, model.session)
    return [each for each in found if each.model == model.id]


def _run(client: Client, model: ModelRecord) -> dict[str, Any]:
    saved = [_checkpoint(weights) for weights in _weights_of(client, model)]
    last = {each["checkpoint_type"]: each for each in saved}
    return {
        "training_run_id": model.id,
        "base_model": model.base_model,
        "model_owner": client.caller.tenant,
        "is_lora": model.lora is not None,
        "lora_rank": None if model.lora is None else model.lora["rank"],
        "last_request_time": _time(model.made_at),
        "last_checkpoint": last.get("training"),
        "last_sampler_checkpoint": last.get("sampler"),
        "user_metadata": {name: str(value) for name, value in model.metadata.items()},
    }


def _checkpoint(weights: WeightsRecord) -> dict[str, Any]:
    kind, name = weights.id.split("/")[-2:]
    return {
        "checkpoint_id": f"{kind}/{name}",
        "checkpoint_type": KINDS[kind],
        "time": _time(weights.made_at),
        "tinker_path": weights.id,
        "public": False,
        "user_metadata": weights.metadata or None,
        "expires_at": None if weights.expires_at is None else _time(weights.expires_at),
    }


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
