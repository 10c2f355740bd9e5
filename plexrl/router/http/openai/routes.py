"""OpenAI-compatible routes of a rollout deployment, the captured calls, and keys of a job."""

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from plexrl.access import AccessRole
from plexrl.errors import InvalidRequestError, NotFoundError
from plexrl.model.deployment_spec import DeploymentSpec
from plexrl.model.text.tokenizer import Tokenizer
from plexrl.process.folders.operator_key import new_api_key
from plexrl.router.execution.deployment_specs import OwnedSpec
from plexrl.router.http.openai.generation import (
    OpenAIGeneration,
    chat_sampling,
    repeated_operation,
)
from plexrl.router.http.openai.prompts import Prompt, chat_prompt, text_prompt
from plexrl.router.http.openai.requests import ChatRequest, CompletionRequest
from plexrl.router.http.openai.trajectory import (
    CapturedCall,
    CapturedReply,
    decode_calls,
    replies,
    segments,
)
from plexrl.router.http.routes.deployments import texts_of
from plexrl.router.http.routes.streams import SERVER_SENT, STREAM_HEADERS
from plexrl.router.job_files.record_store import JobKey
from plexrl.router.services.authentication import Caller, key_digest
from plexrl.router.services.guarded_route import GuardedRoute
from plexrl.router.services.services import RouterServices, Services
from plexrl.wire import scheduler_methods as m
from plexrl.wire.operations import SamplingParams
from plexrl.wire.parameter_checks import check_identifier, check_name

CHOICES_MAX = 64
"""Choices of a captured call."""
TOKENIZERS_MAX = 32
"""Tokenizers that a router keeps."""
DEPLOYMENT = "/{job}/deployments/{name}/openai"
TRAJECTORY = f"{DEPLOYMENT}/trajectories/{{trajectory}}"

_ENDPOINT = re.compile(r"/v1/jobs/[^/]+/deployments/[^/]+/openai(/.*)?")

ROUTES = APIRouter(prefix="/v1/jobs", tags=["openai"], route_class=GuardedRoute)


def is_endpoint(path: str) -> bool:
    """Whether errors of this path are in OpenAI's form."""
    return _ENDPOINT.fullmatch(path) is not None


@ROUTES.post("/{job}/keys", status_code=201, summary="Create an API key of a job; it is shown once")
async def add_key(request: Request, services: Services, job: str) -> dict[str, str]:
    """The key opens the OpenAI-compatible endpoints of this job and nothing else, is valid until
    the job ends or has another controller, and what it asks for counts as the job's. A job has at
    most 16 keys: a further one takes the place of the oldest."""
    key = new_api_key()
    await services.ask(request, m.ADD_JOB_KEY, job=job, key_digest=key_digest(key))
    return {"job": job, "api_key": key}


@ROUTES.delete("/{job}/keys", summary="Revoke all API keys of a job")
async def revoke_keys(request: Request, services: Services, job: str) -> dict[str, str]:
    """No router accepts them any more once this is answered. Streams end within seconds; other
    requests in progress are finished."""
    await services.ask(request, m.REVOKE_JOB_KEYS, job=job)
    return {"job": job}


@ROUTES.get(f"{DEPLOYMENT}/v1/models", summary="The deployment as OpenAI's list of models")
@ROUTES.get(f"{TRAJECTORY}/v1/models", include_in_schema=False)
async def models(request: Request, services: Services, job: str, name: str) -> dict[str, object]:
    """One model: the deployment's name."""
    caller = await services.caller(request)
    await services.spec(f"{job}/{name}", caller)
    model = {"id": name, "object": "model", "created": 0, "owned_by": caller.tenant}
    return {"object": "list", "data": [model]}


@dataclass(frozen=True, slots=True)
class _Target:
    """The deployment that a request names, and how its call is captured and repeated."""

    request: Request
    services: RouterServices
    job: str
    name: str
    trajectory: str
    """Empty: the call is not captured."""
    idempotency_key: str

    @property
    def deployment(self) -> str:
        """Id of the deployment."""
        return f"{self.job}/{self.name}"

    async def replies(self, tenant: str) -> list[CapturedReply]:
        """The captured replies of the trajectory of a tenant's job so far."""
        if not self.trajectory:
            return []
        key = JobKey(tenant, self.job)
        calls = await _calls(self.services, key, self.name, self.trajectory)
        return await asyncio.to_thread(replies, calls)


def _target(
    request: Request,
    services: Services,
    job: str,
    name: str,
    trajectory: str = "",
    plexrl_trajectory: str = Header(""),
    idempotency_key: str = Header(""),
) -> _Target:
    captured = trajectory or plexrl_trajectory
    return _Target(request, services, job, name, captured, idempotency_key)


Target = Annotated[_Target, Depends(_target)]


@ROUTES.post(
    f"{DEPLOYMENT}/v1/completions", summary="OpenAI's completions", response_class=Response
)
@ROUTES.post(f"{TRAJECTORY}/v1/completions", include_in_schema=False, response_class=Response)
async def completions(target: Target, body: CompletionRequest) -> Response:
    """The call is captured if the path or the header `PlexRL-Trajectory` names a trajectory."""

    def write(tokenizer: Tokenizer, spec: DeploymentSpec, known: list[CapturedReply]) -> _Written:
        prompts = [text_prompt(tokenizer, body, text, known) for text in body.prompts()]
        sampling = body.sampling(body.max_tokens or spec.max_sequence_tokens, body.logprobs or 0)
        return prompts, sampling

    return await _generate(target, body, write)


@ROUTES.post(
    f"{DEPLOYMENT}/v1/chat/completions",
    summary="OpenAI's chat completions",
    response_class=Response,
)
@ROUTES.post(f"{TRAJECTORY}/v1/chat/completions", include_in_schema=False, response_class=Response)
async def chat_completions(target: Target, body: ChatRequest) -> Response:
    """The conversation is written by the model's own chat template, which also gets the tools. The
    call is captured if the path or the header `PlexRL-Trajectory` names a trajectory: a
    conversation that goes on after a captured reply then continues its exact tokens."""

    def write(tokenizer: Tokenizer, spec: DeploymentSpec, known: list[CapturedReply]) -> _Written:
        prompt = chat_prompt(tokenizer, body, known)
        return [prompt], chat_sampling(body, prompt, spec)

    return await _generate(target, body, write)


_Written = tuple[list[Prompt], SamplingParams]
"""The prompts of a request, and how they are sampled."""


async def _generate(
    target: _Target,
    body: ChatRequest | CompletionRequest,
    write: Callable[[Tokenizer, DeploymentSpec, list[CapturedReply]], _Written],
) -> Response:
    """Answer a request whose prompts `write` makes, in a thread."""
    caller, (spec, tenant) = await _opened(target, body)
    count = len(body.prompts()) if isinstance(body, CompletionRequest) else 1
    captured = _captured(target.trajectory, count, body.n)
    tokenizer = await _tokenizer(target.services, caller, target.deployment, spec)
    known = await target.replies(tenant)
    prompts, sampling = await asyncio.to_thread(write, tokenizer, spec, known)
    return await _answer(
        OpenAIGeneration(
            services=target.services,
            request=target.request,
            caller=caller,
            tenant=tenant,
            job=target.job,
            name=target.name,
            spec=spec,
            tokenizer=tokenizer,
            body=body,
            prompts=prompts,
            sampling=sampling,
            trajectory=captured,
            operation=_operation(target.job, target.name, target.idempotency_key),
        )
    )


@ROUTES.get(f"{TRAJECTORY}/captured", summary="The segments of a captured trajectory")
async def captured_segments(
    request: Request, services: Services, job: str, name: str, trajectory: str
) -> StreamingResponse:
    """Each has `tokens`, and for each of them `mask` (1: drawn) and `logprobs`; `weights`, spans of
    `[start, version, trainer_step]`; `finish_reason` and `operations`. They are kept for an hour
    after the trajectory's last call."""
    caller = await services.caller(request)
    owned = await services.owned_spec(f"{job}/{name}", caller)
    calls = await _calls(services, JobKey(owned.tenant, job), name, _captured(trajectory, 1, 1))
    if not calls:
        raise NotFoundError(
            f"nothing of trajectory {trajectory!r} is captured: name it in the path or the header "
            "of its requests, and read it within an hour after the last one"
        )
    # Segments share turns, so all of them may be much longer than the calls: one is made at a time.
    return StreamingResponse(_segment_parts(calls), media_type="application/json")


def _segment_parts(calls: list[CapturedCall]) -> Iterator[bytes]:
    yield b'{"segments":['
    for index, segment in enumerate(segments(calls)):
        yield (b"," if index else b"") + json.dumps(segment).encode()
    yield b"]}"


async def _opened(
    target: _Target, body: ChatRequest | CompletionRequest
) -> tuple[Caller, OwnedSpec]:
    caller = await target.services.caller(target.request)
    owned = await target.services.owned_spec(target.deployment, caller)
    name, kind = target.name, owned.spec.kind
    if kind != "rollout":
        raise InvalidRequestError(f"{name!r} is a {kind} deployment, and only rollouts answer")
    body.check_known()
    if body.model not in (name, target.deployment):
        raise NotFoundError(
            f"there is no model {body.model!r} here: the deployment's name is {name!r}",
            where="body.model",
        )
    return caller, owned


def _captured(trajectory: str, prompts: int, choices: int) -> str:
    if not trajectory:
        return ""
    check_name("trajectory", trajectory)
    if prompts > 1:
        raise InvalidRequestError(
            f"{prompts} prompts in one call of a trajectory: send one", where="body.prompt"
        )
    if choices > CHOICES_MAX:
        raise InvalidRequestError(
            f"{choices} choices in one call of a trajectory: {CHOICES_MAX} are the most",
            where="body.n",
        )
    return trajectory


def _operation(job: str, name: str, key: str) -> str:
    check_identifier("job", job)
    return repeated_operation(job, name, key) if key else ""


async def _answer(generation: OpenAIGeneration) -> Response:
    await generation.submit()
    if not generation.body.stream:
        return await asyncio.to_thread(JSONResponse, await generation.answer())
    chunks = generation.chunks()
    if not generation.is_repeatable:
        disconnects = generation.services.disconnects
        chunks = disconnects.guard(chunks, generation.caller, generation.operation)
    return StreamingResponse(
        chunks,
        media_type=SERVER_SENT,
        headers=STREAM_HEADERS,
    )


async def _calls(
    services: RouterServices, job: JobKey, name: str, trajectory: str
) -> list[CapturedCall]:
    loop = asyncio.get_running_loop()
    rows = await loop.run_in_executor(
        services.threads, services.captures.read, job, f"{name}/{trajectory}"
    )
    return await asyncio.to_thread(decode_calls, rows)


async def _tokenizer(
    services: RouterServices, caller: Caller, deployment: str, spec: DeploymentSpec
) -> Tokenizer:
    """The deployment's tokenizer. Raises `NotFoundError` and as `Tokenizer`."""
    key = (deployment, spec.to_json())
    # A tokenizer may be large: it is loaded once, however many requests wait for it.
    async with services.tokenizer_locks.setdefault(key, asyncio.Lock()):
        if (found := services.tokenizers.get(key)) is None:
            found = await _load_tokenizer(services, caller, spec)
            services.tokenizers[key] = found
        services.tokenizers.move_to_end(key)
        while len(services.tokenizers) > TOKENIZERS_MAX:
            services.tokenizers.popitem(last=False)
        return found


async def _load_tokenizer(
    services: RouterServices, caller: Caller, spec: DeploymentSpec
) -> Tokenizer:
    if spec.model.path is not None:
        owner = caller
        if caller.job is not None:
            # With an operator's job, its key reads the model that the operator has named.
            view = await services.scheduler.call(m.CHECKPOINT_OWNER, {"tenant": caller.tenant})
            role = AccessRole.OPERATOR if view["is_operator"] else AccessRole.MEMBER
            owner = replace(caller, role=role)
        await services.model_access.check(spec.model.path, owner)
    loop = asyncio.get_running_loop()
    files = await loop.run_in_executor(services.threads, texts_of, spec.model)
    return await asyncio.to_thread(Tokenizer.from_files, files)
