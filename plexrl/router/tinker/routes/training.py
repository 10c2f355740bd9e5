"""Routes that make, train and save models."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from fastapi import APIRouter

from plexrl.errors import InvalidRequestError, PlexRLError
from plexrl.router.services.error_responses import RETRIABLE
from plexrl.router.tinker.messages.batches import check_loss, train_request, weights_of_forward
from plexrl.router.tinker.messages.codec import read_train_batch
from plexrl.router.tinker.messages.requests import (
    CreateModel,
    LoadWeights,
    ModelName,
    OptimStepRequest,
    SaveForSampler,
    SaveWeights,
)
from plexrl.router.tinker.records import FutureRecord, ModelRecord, WeightsRecord
from plexrl.router.tinker.routes.client import Client, JsonT, TinkerClient, TinkerRoute
from plexrl.router.tinker.sessions import EPHEMERAL_KEPT, ephemeral_prefix, without_seed
from plexrl.router.tinker.training_queue import PendingRequest
from plexrl.statemanager.checkpoint.folder import is_name
from plexrl.wire.tensors import Arrays

ROUTES = APIRouter(route_class=TinkerRoute)
Made = Callable[[ModelRecord], Awaitable[PendingRequest]]


@ROUTES.post("/create_model")
async def create_model(client: TinkerClient) -> dict[str, Any]:
    """Make a model: a train deployment. Its first request waits for GPUs, not this one."""
    asked = await client.read(CreateModel)
    client.session(asked.session_id)
    model = await client.sessions.create_model(client.key, client.caller, asked)
    answer = {"type": "create_model", "model_id": model.id}
    return client.answered(f"{model.id}:created", model.session, answer)


@ROUTES.post("/get_info")
async def get_info(client: TinkerClient) -> dict[str, Any]:
    """A model's name, tokenizer and adapters."""
    asked = await client.read(ModelName)
    model = client.sessions.find(ModelRecord, asked.model_id, client.caller)
    return {
        "type": "get_info",
        "model_id": model.id,
        "model_name": model.base_model,
        "model_data": {
            "model_name": model.base_model,
            "tokenizer_id": _tokenizer_of(model.base_model, model.folder),
        },
        "is_lora": model.lora is not None,
        "lora_rank": None if model.lora is None else model.lora["rank"],
    }


@ROUTES.post("/forward_backward")
async def forward_backward(client: TinkerClient) -> dict[str, Any]:
    """Add the gradients of a batch to those that wait for a step; with `forward_only` none."""
    body = await client.body()
    batch = await asyncio.to_thread(read_train_batch, body)

    async def make(model: ModelRecord) -> PendingRequest:
        def translate() -> tuple[str, dict[str, Any], Any, dict[str, Any]]:
            check_loss(batch)
            kind, params, arrays = train_request(batch)
            kept: dict[str, Any] = {"lengths": arrays["lengths"].tolist()}
            if batch.forward_only:
                kept["weights"] = weights_of_forward(batch)
            return kind, params, arrays, kept

        kind, params, arrays, kept = await asyncio.to_thread(translate)
        future = _future(model, batch.seq_id, kind, kept)
        return _pending(client, kind, params, future, arrays)

    return await _submit(client, batch.model_id, batch.seq_id, make)


@ROUTES.post("/optim_step")
async def optim_step(client: TinkerClient) -> dict[str, Any]:
    """A step of AdamW with the gradients that wait, and this step's numbers."""
    asked = await _read(client, OptimStepRequest)

    async def make(model: ModelRecord) -> PendingRequest:
        future = _future(model, asked.seq_id, "optim_step", {})
        params = asked.adam_params.model_dump(include=set(type(asked.adam_params).model_fields))
        return _pending(client, "optim_step", params, future)

    return await _submit(client, asked.model_id, asked.seq_id, make)


@ROUTES.post("/save_weights")
async def save_weights(client: TinkerClient) -> dict[str, Any]:
    """Save a checkpoint to resume training from."""
    asked = await _read(client, SaveWeights)

    async def make(model: ModelRecord) -> PendingRequest:
        name = _checkpoint_name(model, "weights", asked.path)
        record = _weights(
            model, "weights", asked.path, name, asked.ttl_seconds, asked.user_metadata
        )
        answer = {"type": "save_weights", "path": record.id}
        future = _future(
            model, asked.seq_id, "save_weights", _saves(record, answer, asked.overwrite)
        )
        params = {"name": name, "overwrite": asked.overwrite}
        return _pending(client, kind="save_checkpoint", params=params, future=future)

    return await _submit(client, asked.model_id, asked.seq_id, make)


@ROUTES.post("/save_weights_for_sampler")
async def save_for_sampler(client: TinkerClient) -> dict[str, Any]:
    """Save weights to sample from, by a path or by a sampler of their own."""
    asked = await _read(client, SaveForSampler)

    async def make(model: ModelRecord) -> PendingRequest:
        kept: dict[str, Any]
        if asked.path is not None:
            name = _checkpoint_name(model, "sampler", asked.path)
            record = _weights(
                model, "sampler_weights", asked.path, name, asked.ttl_seconds, asked.user_metadata
            )
            kept = _saves(record, {"path": record.id}, overwrites=False)
            params: dict[str, Any] = {"name": name, "format": "hf"}
        elif asked.sampling_session_seq_id is None:
            raise InvalidRequestError("give a path, or a sampling_session_seq_id")
        else:
            name = f"{ephemeral_prefix(model)}{asked.seq_id}"
            sampler = f"{model.session}:sample:{asked.sampling_session_seq_id}"
            session = client.session(model.session)
            await client.sessions.sampler_of(
                client.key, session, sampler, model, (model.session, name), None
            )
            kept = {"answer": {"sampling_session_id": sampler}}
            params = {
                "name": name,
                "format": "hf",
                "step": asked.seq_id,
                "keep_last": EPHEMERAL_KEPT,
                "keep_prefix": ephemeral_prefix(model),
            }
        future = _future(model, asked.seq_id, "save_for_sampler", kept)
        return _pending(client, kind="save_checkpoint", params=params, future=future)

    return await _submit(client, asked.model_id, asked.seq_id, make)


@ROUTES.post("/load_weights")
async def load_weights(client: TinkerClient) -> dict[str, Any]:
    """Load saved weights into a model, or make a model of them."""
    asked = await _read(client, LoadWeights)
    if asked.model_id is None or asked.seq_id is None:
        return await _create_of_weights(client, asked)

    async def make(model: ModelRecord) -> PendingRequest:
        assert asked.seq_id is not None
        return _load(client, model, f"{model.id}:{asked.seq_id}", asked)

    return await _submit(client, asked.model_id, asked.seq_id, make)


async def _create_of_weights(client: Client, asked: LoadWeights) -> dict[str, Any]:
    if asked.session_id is None or asked.model_seq_id is None:
        raise InvalidRequestError(
            "give a model_id and a seq_id, or a session_id and a model_seq_id"
        )
    session = client.session(asked.session_id)
    source = _source(client, asked.path)
    folder = source.folder
    if asked.base_model is not None:
        folder = await client.sessions.folder_of(asked.base_model, client.caller)
    model = msgspec.structs.replace(
        source,
        id=f"{session.id}:train:{asked.model_seq_id}",
        session=session.id,
        made_at=time.time(),
        deployment=f"{session.id}/train-{asked.model_seq_id}",
        base_model=asked.base_model or source.base_model,
        folder=folder,
        next_seq=1,
        metadata={**source.metadata, **(asked.user_metadata or {})},
    )
    model = await client.sessions.deploy_model(client.key, session, asked.model_seq_id, model)
    pending = _load(client, model, f"{model.id}:created", asked)
    await client.sessions.api.submit(
        client.key, model.deployment, pending.kind, pending.future.operation, pending.params
    )
    client.sessions.records.put(pending.future)
    return {"request_id": pending.future.id, "model_id": model.id}


def _source(client: Client, path: str) -> ModelRecord:
    """The model that saved the weights at a path."""
    weights = client.sessions.weights(path, client.caller)
    return client.sessions.find(ModelRecord, weights.model, client.caller)


def _load(client: Client, model: ModelRecord, request: str, asked: LoadWeights) -> PendingRequest:
    weights = client.sessions.weights(asked.path, client.caller)
    source = client.sessions.find(ModelRecord, weights.model, client.caller)
    if without_seed(source.lora) != without_seed(model.lora):
        raise InvalidRequestError(
            f"{asked.path} has the adapters {source.lora}, and the model has {model.lora}: load "
            "weights of a model with the same rank and layers, or make a client of them "
            "(create_training_client_from_state)"
        )
    params = {"name": weights.checkpoint, "job": weights.session, "optimizer": asked.optimizer}
    answer = {"type": "load_weights", "path": asked.path, "model_id": model.id}
    future = FutureRecord(
        id=request,
        session=model.session,
        kind="load_weights",
        operation=request,
        result={"answer": answer},
    )
    return _pending(client, "load_checkpoint", params, future)


class _Number(msgspec.Struct):
    """What a body that is refused still has to say."""

    model_id: str
    seq_id: int


async def _read(client: Client, kind: type[JsonT]) -> JsonT:
    """The JSON of a model's request. One that is refused uses its number.

    Raises:
        InvalidRequestError: it is refused.
    """
    body = await client.json()
    try:
        return kind.read(body)
    except InvalidRequestError as error:
        try:
            numbered = msgspec.json.decode(body, type=_Number)
        except msgspec.DecodeError:
            raise error from None
        model = client.model(numbered.model_id)
        client.sessions.futures.queue.refuse(client.key, model, numbered.seq_id, error)
        raise


def _pending(
    client: Client,
    kind: str,
    params: dict[str, Any],
    future: FutureRecord,
    arrays: Arrays | None = None,
) -> PendingRequest:
    return PendingRequest(
        key=client.key,
        tenant=client.caller.tenant,
        kind=kind,
        params=params,
        arrays=arrays,
        future=future,
    )


async def _submit(client: Client, model_id: str, seq: int, make: Made) -> dict[str, Any]:
    """Submit a model's request in the order of its numbers. One that is refused uses its number,
    and the poll of its future says why: the SDK sends the first part of a batch only after the
    answers to all others, so that it must have these."""
    model, queue = client.model(model_id), client.sessions.futures.queue
    answer = {"request_id": f"{model.id}:{seq}", "model_id": model.id}
    if queue.is_known(model.id, seq):
        queue.advance(client.key, model.id)
        return answer
    try:
        pending = await make(model)
    except RETRIABLE:
        raise
    except PlexRLError as error:
        queue.refuse(client.key, model, seq, error)
    else:
        await queue.accept(model, seq, pending)
    return answer


def _future(model: ModelRecord, seq: int, kind: str, kept: dict[str, Any]) -> FutureRecord:
    request = f"{model.id}:{seq}"
    return FutureRecord(
        id=request, session=model.session, kind=kind, operation=request, result=kept
    )


def _weights(
    model: ModelRecord,
    kind: str,
    name: str,
    checkpoint: str,
    ttl_s: int | None,
    metadata: dict[str, str] | None,
) -> WeightsRecord:
    return WeightsRecord(
        id=f"tinker://{model.id}/{kind}/{name}",
        session=model.session,
        model=model.id,
        checkpoint=checkpoint,
        expires_at=None if ttl_s is None else time.time() + ttl_s,
        metadata=metadata or {},
    )


def _saves(record: WeightsRecord, answer: dict[str, Any], overwrites: bool) -> dict[str, Any]:
    kept = msgspec.to_builtins(record)
    return {"answer": answer, "weights_record": kept, "overwrites": overwrites}


def _checkpoint_name(model: ModelRecord, kind: str, name: str) -> str:
    """Name of a model's checkpoint in its job.

    Raises:
        InvalidRequestError: the client's name cannot name a checkpoint.
    """
    found = f"{model.id.rpartition(':')[2]}.{kind}.{name}"
    if not is_name(found) or name.startswith("step-"):
        raise InvalidRequestError(
            f"{name!r} cannot name saved weights: use up to 80 letters, digits, '.', '_' and '-', "
            "and begin with another word than 'step-'",
            parameter="name",
        )
    return found


def _tokenizer_of(name: str, folder: str) -> str:
    """What the SDK loads a base model's tokenizer by: a name of the form `org/name` is one of the
    Hugging Face hub, any other is the directory, which the client must be able to read."""
    return name if name.count("/") == 1 and not name.startswith("/") else folder
