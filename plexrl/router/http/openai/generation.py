"""One request in OpenAI's form as a generation of the cluster, with its captured call.

The generation is an operation like those of the SDK: it is journalled before it runs, waits in the
same queue and counts in the same quotas. A call of a trajectory is stored before it is answered.
"""

import asyncio
import hashlib
import json
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import xxhash
from fastapi import Request

from plexrl.client.data.batch import Batch
from plexrl.client.data.results import GenerateResult, Sample, generate_decoder
from plexrl.errors import (
    ConnectionLostError,
    ExecutionError,
    InvalidRequestError,
    OperationCancelledError,
    PlexRLError,
    from_wire,
)
from plexrl.ids import BlobRef
from plexrl.model.deployment_spec import DeploymentSpec
from plexrl.model.text.tokenizer import Tokenizer
from plexrl.router.blobs.store import Upload
from plexrl.router.http.openai.answers import (
    DONE,
    Asked,
    chunk,
    error_body,
    event,
    last_choice,
    reply_message,
    reply_text,
    text_choice,
    usage,
    whole_answer,
)
from plexrl.router.http.openai.prompts import Prompt, canonical, chat_settings
from plexrl.router.http.openai.requests import ChatRequest, CompletionRequest, plain_message
from plexrl.router.http.openai.texts import GrowingText
from plexrl.router.http.openai.trajectory import CallHistory, history_digest, make_call
from plexrl.router.http.operation_checks import check_operation
from plexrl.router.http.routes.operations import submit_checked
from plexrl.router.http.streams.events import read_cursor
from plexrl.router.http.streams.token_reader import TokenReader
from plexrl.router.job_files.record_store import JobKey
from plexrl.router.services.authentication import Caller
from plexrl.router.services.error_responses import public_error
from plexrl.router.services.services import RouterServices
from plexrl.wire import scheduler_methods as m
from plexrl.wire.operations import GenerateParams, OperationState, SamplingParams
from plexrl.wire.tensors import decode_body, encode_body

WAIT_S = 2.0
"""Time after which it is checked whether the client is still there."""
LOGPROBS_MAX = 2_000_000
"""Logprobs that an answer may have."""


@dataclass(slots=True, kw_only=True)
class OpenAIGeneration:
    """One request, from its prompts to its answer."""

    services: RouterServices
    request: Request
    caller: Caller
    tenant: str
    """The job's."""
    job: str
    name: str
    """Name of the deployment in its job."""
    spec: DeploymentSpec
    tokenizer: Tokenizer
    body: ChatRequest | CompletionRequest
    prompts: list[Prompt]
    sampling: SamplingParams
    trajectory: str
    """Name of the captured trajectory; empty: the call is not captured."""
    operation: str = ""
    is_repeatable: bool = field(init=False)
    """Whether the client may send it again, as the same operation."""
    asked: Asked = field(init=False)

    def __post_init__(self) -> None:
        self.is_repeatable = bool(self.operation)
        self.operation = self.operation or f"{self.job}:{uuid.uuid4().hex}"
        is_chat = isinstance(self.body, ChatRequest)
        self.asked = Asked(
            answer=("chatcmpl-" if is_chat else "cmpl-") + self.operation.rpartition(":")[2],
            created=int(time.time()),
            model=self.name,
            is_chat=is_chat,
            stops=self.sampling.stop_strings,
            top_logprobs=self.sampling.top_logprobs,
            has_logprobs=self.body.logprobs is not None and self.body.logprobs is not False,
            has_tools=isinstance(self.body, ChatRequest) and bool(self.body.offered_tools),
            has_token_ids=self.body.return_token_ids,
        )

    @property
    def tokens(self) -> list[list[int]]:
        """The prompts as tokens."""
        return [prompt.tokens for prompt in self.prompts]

    async def submit(self) -> None:
        """Have the generation accepted.

        Raises:
            InvalidRequestError: the answer could have more than `LOGPROBS_MAX` logprobs.
            QuotaExceededError: there is no room to capture the call.
            PlexRLError: what `submit` of operations raises.
        """
        self._check_logprobs()
        if self.trajectory:
            await asyncio.get_running_loop().run_in_executor(
                self.services.threads,
                self.services.captures.check,
                JobKey(self.tenant, self.job),
                f"{self.name}/{self.trajectory}",
                self.operation,
            )
        params = GenerateParams(
            samples_per_prompt=self.body.n, sampling=self.sampling, stream=self.body.stream
        )
        arrays = Batch(self.tokens).arrays(())
        plain: dict[str, Any] = msgspec.to_builtins(msgspec.structs.asdict(params))
        checked = check_operation(self.spec, "generate", plain, arrays)
        content = encode_body(plain, arrays)
        upload = Upload(content, None, xxhash.xxh3_128_hexdigest(content))
        fields = {
            "operation": self.operation,
            "deployment": f"{self.job}/{self.name}",
            "deadline_s": None,
            "from_job_key": self.caller.job is not None,
            **self.caller.claim,
        }
        await submit_checked(self.services, fields, checked, upload)

    def _check_logprobs(self) -> None:
        if not self.asked.has_logprobs:
            return
        tokens = min(self.sampling.max_tokens, self.spec.max_sequence_tokens)
        each = 1 + self.sampling.top_logprobs
        if (found := len(self.prompts) * self.body.n * tokens * each) > LOGPROBS_MAX:
            raise InvalidRequestError(
                f"the answer could have {found} logprobs, and {LOGPROBS_MAX} are the most: ask for "
                "fewer samples, tokens or likely tokens",
                where="body.logprobs",
            )

    async def answer(self) -> dict[str, Any]:
        """Wait for the result, capture the call and return the answer.

        Raises:
            ConnectionLostError: the client has left; the generation is cancelled, unless it is
                repeatable.
        """
        result = await self._result()
        await self._capture(result)
        return await asyncio.to_thread(
            whole_answer, self.tokenizer, self.asked, self.tokens, result
        )

    async def chunks(self) -> AsyncIterator[bytes]:
        """The answer as server-sent events. A failure is the last one."""
        try:
            async for part in self._chunks():
                yield part
            yield DONE
        except PlexRLError as error:
            shown = error if self.caller.sees_all else public_error(error)
            yield event(error_body(shown))

    async def _chunks(self) -> AsyncIterator[bytes]:
        texts = [
            GrowingText(self.tokenizer, self.asked.stops, self.asked.has_tools)
            for _ in range(len(self.prompts) * self.body.n)
        ]
        if self.asked.is_chat:
            heads = [text_choice(self.asked, at, "", is_first=True) for at in range(len(texts))]
            yield chunk(self.asked, heads)
        reader = TokenReader(self.services, self.caller, self.operation, read_cursor(""))
        async for found in reader.events():
            await self.services.check_still_valid(self.request)
            if "restart" in found:
                for text in texts:
                    text.restart()
            elif "error" in found:
                raise from_wire(found["error"])
            elif "waiting" in found and self.services.shutdown.has_begun:
                raise ConnectionLostError("the router stops: send the request again")
            for part in await asyncio.to_thread(self._parts, texts, found.get("rows", ())):
                yield part
        result = await self._result()
        samples = [sample for group in result.samples for sample in group]
        wholes = await asyncio.to_thread(self._wholes, samples, texts)
        await self._capture(result)
        for at, (sample, text, whole) in enumerate(zip(samples, texts, wholes, strict=True)):
            for part in await asyncio.to_thread(self._end, at, sample, text, whole):
                yield part
        if self.body.stream_options is not None and self.body.stream_options.include_usage:
            yield chunk(self.asked, [], usage=usage(self.tokens, result))

    def _parts(self, texts: Sequence[GrowingText], rows: Sequence[Any]) -> list[bytes]:
        parts = [(row["sample"], texts[row["sample"]].take(row["tokens"])) for row in rows]
        return [
            chunk(self.asked, [text_choice(self.asked, sample, part, is_first=False)])
            for sample, part in parts
            if part
        ]

    def _wholes(self, samples: Sequence[Sample], texts: Sequence[GrowingText]) -> list[str]:
        wholes = [reply_text(self.tokenizer, self.asked, sample) for sample in samples]
        for whole, text in zip(wholes, texts, strict=True):
            if not whole.startswith(text.sent):
                raise ExecutionError(
                    "the generation was repeated after a fault, and has drawn another text than "
                    "the one sent so far: send the request again"
                )
        return wholes

    def _end(self, index: int, sample: Sample, text: GrowingText, whole: str) -> list[bytes]:
        content = whole
        if self.asked.has_tools:
            content = reply_message(self.asked, index, whole)["content"] or ""
        found = []
        if part := text.rest(content):
            found.append(chunk(self.asked, [text_choice(self.asked, index, part, is_first=False)]))
        found.append(
            chunk(self.asked, [last_choice(self.tokenizer, self.asked, index, sample, whole)])
        )
        return found

    async def _result(self) -> GenerateResult:
        while True:
            view = await self.services.operation(self.caller, self.operation, WAIT_S)
            if OperationState(view["state"]).is_final:
                break
            if await self.request.is_disconnected():
                if self.is_repeatable:
                    raise ConnectionLostError("the client has left: its generation goes on")
                await self.services.scheduler.call(
                    m.CANCEL_OPERATION, {"operation": self.operation, **self.caller.claim}
                )
                raise ConnectionLostError("the client has left: its generation is cancelled")
            if self.services.shutdown.has_begun:
                raise ConnectionLostError("the router stops: send the request again")
        if view["state"] != OperationState.FINISHED:
            raise from_wire(view["error"])
        assert view["result"] is not None, "a generation has a result"
        _, arrays = decode_body(await self.services.blobs.read(BlobRef(view["result"])))
        decode = generate_decoder(self.body.n, [len(prompt) for prompt in self.tokens])
        result = decode(json.loads(view["result_json"]), arrays)
        assert isinstance(result, GenerateResult)
        if any(each.finish_reason == "abort" for group in result.samples for each in group):
            raise OperationCancelledError("the generation was cut off: send the request again")
        return result

    async def _capture(self, result: GenerateResult) -> None:
        """Store the call, if it belongs to a trajectory."""
        if not self.trajectory:
            return
        row = await asyncio.to_thread(self._captured, result)
        await asyncio.get_running_loop().run_in_executor(
            self.services.threads,
            self.services.captures.add,
            JobKey(self.tenant, self.job),
            f"{self.name}/{self.trajectory}",
            self.operation,
            row,
        )

    def _captured(self, result: GenerateResult) -> bytes:
        call = make_call(
            self.operation,
            time.time(),
            self.prompts[0].parent,
            self.prompts[0].tokens,
            result,
            histories=self._histories(result.samples[0]),
        )
        return msgspec.json.encode(call)

    def _histories(self, samples: Sequence[Sample]) -> list[CallHistory]:
        """The history that each sample ends."""
        texts = [reply_text(self.tokenizer, self.asked, sample) for sample in samples]
        if isinstance(self.body, ChatRequest):
            settings, before = chat_settings(self.body), self.body.conversation()
            found = []
            for index, text in enumerate(texts):
                reply = plain_message(len(before), reply_message(self.asked, index, text))
                history = canonical([*before, reply])
                digest = history_digest("chat", history, settings)
                found.append(CallHistory(len(history), digest))
            return found
        given = self.body.prompts()[0]
        if not isinstance(given, str):
            return [CallHistory(0, "") for _ in samples]
        return [
            CallHistory(
                len(given + text),
                history_digest("text", given + text),
                self.tokenizer.decode(sample.tokens)[len(text) :],
            )
            for sample, text in zip(samples, texts, strict=True)
        ]


def repeated_operation(job: str, deployment: str, key: str) -> str:
    """The operation of all requests to a deployment with the same `Idempotency-Key`."""
    digest = hashlib.sha256(f"{deployment}\n{key}".encode()).hexdigest()
    return f"{job}:{digest[:32]}"


def chat_sampling(body: ChatRequest, prompt: Prompt, spec: DeploymentSpec) -> SamplingParams:
    """How the tokens of a reply are drawn: without a bound of its own as many as fit."""
    room = max(1, spec.max_sequence_tokens - len(prompt.tokens))
    asked = body.max_completion_tokens or body.max_tokens or room
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequestError(
            "top_logprobs needs logprobs: true: add it", where="body.top_logprobs"
        )
    return body.sampling(asked, body.top_logprobs or 0)
