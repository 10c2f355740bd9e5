"""Routes that sample."""

from typing import Any

from fastapi import APIRouter

from plexrl.errors import InvalidRequestError
from plexrl.router.tinker.completions import HOLD_S, Completion
from plexrl.router.tinker.messages.batches import sample_request
from plexrl.router.tinker.messages.requests import AsampleRequest, CreateSampler, FutureNames
from plexrl.router.tinker.records import FutureRecord, RolloutRecord, SamplerRecord
from plexrl.router.tinker.routes.client import TinkerClient, TinkerRoute

ROUTES = APIRouter(route_class=TinkerRoute)


@ROUTES.post("/create_sampling_session")
async def create_sampler(client: TinkerClient) -> dict[str, Any]:
    """Make a sampler of a base model, or of saved weights."""
    asked = await client.read(CreateSampler)
    session = client.session(asked.session_id)
    weights = None
    if asked.model_path is not None:
        weights = client.sessions.weights(asked.model_path, client.caller)
    elif asked.base_model is None:
        raise InvalidRequestError("give a base_model or a model_path")
    sampler = f"{session.id}:sample:{asked.sampling_session_seq_id}"
    found = await client.sessions.create_sampler(
        client.key, client.caller, sampler, session, asked.base_model or "", weights
    )
    return {"type": "create_sampling_session", "sampling_session_id": found.id}


@ROUTES.get("/samplers/{sampler}")
async def get_sampler(client: TinkerClient, sampler: str) -> dict[str, Any]:
    """The base model and the weights of a sampler."""
    found = client.sessions.find(SamplerRecord, sampler, client.caller)
    return {"sampler_id": found.id, "base_model": found.base_model, "model_path": found.path}


@ROUTES.post("/asample")
async def sample(client: TinkerClient) -> dict[str, Any]:
    """Draw samples of a prompt."""
    asked = await client.read(AsampleRequest)
    if asked.sampling_session_id is None or asked.seq_id is None:
        raise InvalidRequestError("give a sampling_session_id and a seq_id, as the SDK does")
    sampler = client.sessions.find(SamplerRecord, asked.sampling_session_id, client.caller)
    client.session(sampler.session)
    params, arrays = sample_request(asked)
    request = f"{sampler.id}:{asked.seq_id}"
    future = FutureRecord(
        id=request,
        session=sampler.session,
        kind="sample",
        operation=request,
        result={"last": asked.prompt_logprobs_last_n},
    )
    rollout = RolloutRecord(id=sampler.deployment, session=sampler.session)
    await client.sessions.futures.sample(
        client.key, rollout, sampler.checkpoint, future, params, arrays
    )
    ids = [f"{request}.{index}" for index in range(asked.num_samples)]
    return {"request_id": request, "sample_sequence_ids": ids}


@ROUTES.post("/retrieve_futures")
async def retrieve_all(client: TinkerClient) -> dict[str, Any]:
    """The samples of a sampler that have ended since the last poll. 410: its session has ended."""
    asked = await client.read(FutureNames)
    target = asked.target
    sampler = client.sessions.find(SamplerRecord, target.sampling_session_id, client.caller)
    client.session(sampler.session)
    completions = client.sessions.completions
    completions.drop(sampler, asked.retrieved_request_ids)
    hold_s = HOLD_S if asked.timeout is None else min(asked.timeout, HOLD_S)
    ended, cursor = await completions.poll(
        client.key, sampler, target.cloned_sampler_id, asked.prev_cursor, hold_s
    )
    return {"completions": [_shown(completion) for completion in ended], "cursor": cursor}


def _shown(completion: Completion) -> dict[str, Any]:
    if completion.is_failed:
        return {"state": "failed", "request_id": completion.request}
    return {
        "state": "finished",
        "request_id": completion.request,
        "response_payload_uncompressed_size": completion.nbytes,
    }
