"""Bodies of requests in OpenAI's form, and what they ask an engine for.

A field that changes what is drawn and is not supported is refused; fields about billing, storage
and caching are read and have no effect.
"""

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from plexrl.errors import InvalidRequestError
from plexrl.wire.operations import SamplingParams

COMPLETION_TOKENS = 16
"""Tokens of a completion whose request names no number, as OpenAI has it."""
STOPS_MAX = 16
TOP_LOGPROBS_MAX = 20
STOP_MAX = 1000
"""Characters of a stop string."""
StopString = Annotated[str, Field(max_length=STOP_MAX)]
NO_EFFECT = frozenset(
    {
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
        *("prompt_cache_retention", "parallel_tool_calls"),
    }
)
"""Fields of OpenAI's that are read and have no effect here."""

_OFF: tuple[object, ...] = (None, 0, 0.0, False, {}, [])


class StreamOptions(BaseModel):
    """The options of a stream."""

    model_config = ConfigDict(extra="ignore")
    include_usage: bool = False


class _Request(BaseModel):
    # Unknown fields are checked by `check_known`: some of OpenAI's are accepted.
    model_config = ConfigDict(extra="allow")

    model: str = Field(description="name of the deployment")
    n: Annotated[int, Field(ge=1, le=1024)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=STOPS_MAX)] | None = None
    top_k: int = Field(0, description="0: the whole vocabulary")
    stop_token_ids: list[int] = Field([], max_length=1000)
    ignore_eos: bool = False
    return_token_ids: bool = Field(
        default=False, description="add `prompt_token_ids`, and `token_ids` of each choice"
    )

    def sampling(self, max_tokens: int, top_logprobs: int) -> SamplingParams:
        """The parameters of sampling."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(0, self.top_k),
            seed=self.seed,
            stop_strings=tuple(stop),
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            top_logprobs=top_logprobs,
        )

    def check_known(self) -> None:
        """Refuse fields that would have to change what is drawn.

        Raises:
            InvalidRequestError: there is one.
        """
        for name, value in (self.model_extra or {}).items():
            if name in NO_EFFECT or value in _OFF:
                continue
            if name == "response_format" and value == {"type": "text"}:
                continue
            if name == "best_of" and value == 1:
                continue
            raise InvalidRequestError(
                f"{name} is not supported here: leave it out", where=f"body.{name}"
            )


class CompletionRequest(_Request):
    """A completion of texts, or of token ids."""

    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: Annotated[int, Field(ge=1)] | None = COMPLETION_TOKENS
    logprobs: Annotated[int, Field(ge=0, le=TOP_LOGPROBS_MAX)] | None = None
    add_special_tokens: bool = Field(
        default=True, description="add what the tokenizer adds to a text, such as BOS"
    )

    def check_known(self) -> None:
        """As for all requests; and prompts must be text that can be encoded."""
        super().check_known()
        _check_text("prompt", [prompt for prompt in self.prompts() if isinstance(prompt, str)])

    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a text or token ids.

        Raises:
            InvalidRequestError: there is none.
        """
        given: Any = self.prompt
        is_one = isinstance(given, str) or (given and isinstance(given[0], int))
        found: list[str | list[int]] = [given] if is_one else list(given)
        if not found:
            raise InvalidRequestError("there is no prompt: give one", where="body.prompt")
        return found


class ChatRequest(_Request):
    """A reply to a conversation."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=TOP_LOGPROBS_MAX)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none"] | None = Field(
        None, description="with `none` the template gets no tools"
    )
    chat_template: str | None = Field(
        None, description="the name of one of the model's own templates; absent: the usual one"
    )
    chat_template_kwargs: dict[str, Any] = Field({}, description="what the template reads besides")

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        """The tools that the template gets; None: none."""
        return None if self.tool_choice == "none" else self.tools or None

    def check_known(self) -> None:
        """As for all requests; and what the template reads must be text that can be encoded."""
        super().check_known()
        _check_text("messages", [self.messages, self.tools, self.chat_template_kwargs])

    def conversation(self) -> list[dict[str, Any]]:
        """The messages as templates read them: contents as texts, arguments of calls as objects.

        Raises:
            InvalidRequestError: a message has a part that is no text.
        """
        return [plain_message(index, message) for index, message in enumerate(self.messages)]


def _check_text(name: str, value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except (UnicodeEncodeError, RecursionError) as error:
        raise InvalidRequestError(
            f"{name} cannot be read ({error}): give whole characters, and less depth",
            where=f"body.{name}",
        ) from error


def plain_message(index: int, message: dict[str, Any]) -> dict[str, Any]:
    """One message as templates read it, without fields that are null.

    Raises:
        InvalidRequestError: a part of its content is no text, or it has no role.
    """
    where = f"body.messages.{index}"
    if not isinstance(message.get("role"), str):
        raise InvalidRequestError(f"message {index} has no role: give one", where=f"{where}.role")
    found = {name: value for name, value in message.items() if value not in (None, [])}
    content = message.get("content")
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict)]
        texts = [text for text in parts if isinstance(text, str)]
        if len(texts) != len(content):
            raise InvalidRequestError(
                f"message {index} has a part that is no text: give texts only",
                where=f"{where}.content",
            )
        content = "".join(texts)
    found["content"] = content or ""
    if "tool_calls" in found:
        if not isinstance(found["tool_calls"], list):
            raise InvalidRequestError(
                f"tool_calls of message {index} is no list: give a list of calls",
                where=f"{where}.tool_calls",
            )
        found["tool_calls"] = [_plain_call(where, call) for call in found["tool_calls"]]
    return found


def _plain_call(where: str, call: Any) -> dict[str, Any]:
    try:
        function = call["function"]
        arguments = function.get("arguments") or "{}"
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        return {**call, "function": {"name": function["name"], "arguments": arguments}}
    except (TypeError, KeyError, AttributeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(
            f"a call of a tool is not in OpenAI's form ({error}): give its function's name and its "
            "arguments as JSON",
            where=f"{where}.tool_calls",
        ) from error
