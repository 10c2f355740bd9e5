"""Answers in OpenAI's form: whole ones, and the chunks of a stream. Pure, but for the tokenizer."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plexrl.client.data.results import GenerateResult, Sample
from plexrl.errors import PlexRLError
from plexrl.model.text.tokenizer import Tokenizer
from plexrl.model.text.tool_calls import split_calls
from plexrl.router.http.openai.texts import cut_at_stop, token_text

DONE = b"data: [DONE]\n\n"
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
}
"""OpenAI's type of an error, by status; others of 4xx are `invalid_request_error`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The properties of a request that its answer depends on."""

    answer: str
    """Id of the answer."""
    created: int
    """Seconds since the epoch."""
    model: str
    is_chat: bool
    stops: Sequence[str]
    top_logprobs: int
    has_logprobs: bool
    has_tools: bool
    has_token_ids: bool

    def head(self, *, is_chunk: bool) -> dict[str, Any]:
        """The fields that every answer has."""
        kind = "chat.completion" if self.is_chat else "text_completion"
        return {
            "id": self.answer,
            "object": f"{kind}.chunk" if is_chunk and self.is_chat else kind,
            "created": self.created,
            "model": self.model,
        }


def reply_text(tokenizer: Tokenizer, asked: Asked, sample: Sample) -> str:
    """The text of a sample, without special tokens and what follows a stop string."""
    return cut_at_stop(tokenizer.decode(sample.tokens), asked.stops)


def reply_message(asked: Asked, index: int, text: str) -> dict[str, Any]:
    """A reply as a message; calls of tools in it are calls if the request offered tools."""
    content, calls = split_calls(text) if asked.has_tools else (text, [])
    message: dict[str, Any] = {"role": "assistant", "content": content if content else None}
    if not calls:
        message["content"] = text
        return message
    message["tool_calls"] = [
        {
            "id": f"call_{asked.answer.rpartition('-')[2]}_{index}_{number}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for number, call in enumerate(calls)
    ]
    return message


def finish_reason(sample: Sample, message: Mapping[str, Any] | None = None) -> str:
    """Why the sample ended, in OpenAI's words; `message` is a chat's reply."""
    if message is not None and "tool_calls" in message:
        return "tool_calls"
    return "stop" if sample.finish_reason == "stop" else "length"


def whole_answer(
    tokenizer: Tokenizer, asked: Asked, prompts: Sequence[Sequence[int]], result: GenerateResult
) -> dict[str, Any]:
    """The answer to a request without `stream`."""
    choices: list[dict[str, Any]] = []
    for at, group in enumerate(result.samples):
        for sample in group:
            index = len(choices)
            text = reply_text(tokenizer, asked, sample)
            choice: dict[str, Any] = {"index": index}
            if asked.is_chat:
                choice["message"] = reply_message(asked, index, text)
            else:
                choice["text"] = text
            choice["finish_reason"] = finish_reason(sample, choice.get("message"))
            choice["logprobs"] = logprobs(tokenizer, asked, sample)
            if asked.has_token_ids:
                choice["token_ids"] = sample.tokens
                choice["prompt_token_ids"] = list(prompts[at])
            choices.append(choice)
    answer = {**asked.head(is_chunk=False), "choices": choices, "usage": usage(prompts, result)}
    if asked.has_token_ids and asked.is_chat:
        answer["prompt_token_ids"] = list(prompts[0])
    return answer


def usage(prompts: Sequence[Sequence[int]], result: GenerateResult) -> dict[str, int]:
    """Counts of tokens: each prompt counts once."""
    read = sum(map(len, prompts))
    drawn = sum(len(sample.tokens) for group in result.samples for sample in group)
    return {"prompt_tokens": read, "completion_tokens": drawn, "total_tokens": read + drawn}


def logprobs(tokenizer: Tokenizer, asked: Asked, sample: Sample) -> dict[str, Any] | None:
    """Logprobs of a sample's tokens, under the model itself; None: not asked for."""
    if not asked.has_logprobs:
        return None
    top = [
        [
            (token_text(tokenizer, int(token)), float(logprob))
            for token, logprob in zip(*row, strict=True)
        ]
        for row in ([] if sample.top_logprobs is None else zip(*sample.top_logprobs, strict=True))
    ] or [[] for _ in sample.tokens]
    texts = [token_text(tokenizer, token) for token in sample.tokens]
    values = [float(logprob) for logprob in sample.logprobs]
    if asked.is_chat:
        rows = zip(texts, values, top, strict=True)
        content = [
            {**_entry(text, value), "top_logprobs": [_entry(*each) for each in likely]}
            for text, value, likely in rows
        ]
        return {"content": content, "refusal": None}
    offsets = [0]
    for text in texts[:-1]:
        offsets.append(offsets[-1] + len(text))
    return {
        "tokens": texts,
        "token_logprobs": values,
        "top_logprobs": [dict(likely) for likely in top] if asked.top_logprobs else None,
        "text_offset": offsets[: len(texts)],
    }


def _entry(text: str, value: float) -> dict[str, Any]:
    return {"token": text, "logprob": value, "bytes": list(text.encode())}


def chunk(asked: Asked, choices: Sequence[Mapping[str, Any]], **fields: Any) -> bytes:
    """One event of a stream."""
    return event({**asked.head(is_chunk=True), "choices": list(choices), **fields})


def text_choice(asked: Asked, index: int, text: str, *, is_first: bool) -> dict[str, Any]:
    """A part of a choice's text."""
    if not asked.is_chat:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": None}
    delta = {"role": "assistant", "content": text} if is_first else {"content": text}
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def last_choice(
    tokenizer: Tokenizer, asked: Asked, index: int, sample: Sample, text: str
) -> dict[str, Any]:
    """The end of a choice: calls of tools, all logprobs, and why it ended. `text` is the whole."""
    choice: dict[str, Any] = {"index": index, "logprobs": logprobs(tokenizer, asked, sample)}
    message = reply_message(asked, index, text) if asked.is_chat else None
    if message is None:
        choice["text"] = ""
    else:
        calls = message.get("tool_calls", [])
        numbered = [{"index": number, **call} for number, call in enumerate(calls)]
        choice["delta"] = {"tool_calls": numbered} if numbered else {}
    choice["finish_reason"] = finish_reason(sample, message)
    if asked.has_token_ids:
        choice["token_ids"] = sample.tokens
    return choice


def event(plain: Mapping[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(plain, ensure_ascii=False).encode() + b"\n\n"


def error_body(error: PlexRLError) -> dict[str, Any]:
    """An error in OpenAI's form; the message and the code are ours."""
    default = "invalid_request_error" if error.status < 500 else "server_error"
    where = error.details.get("where") or error.details.get("parameter")
    return {
        "error": {
            "message": error.message,
            "type": TYPES.get(error.status, default),
            "param": None if where is None else str(where).removeprefix("body."),
            "code": error.code,
        }
    }
