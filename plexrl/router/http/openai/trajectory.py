"""The captured calls of one trajectory, and the segments to train on. Pure.

A segment is what a model has read and written as one sequence of tokens. A call whose prompt begins
with a reply of the trajectory continues that reply's sequence; its row has only the tokens behind
it. A call whose prompt does not, such as after a harness has shortened the history, begins another
segment.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from plexrl.client.data.results import GenerateResult


class CapturedChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One sample of a call."""

    tokens: list[int]
    """Drawn tokens."""
    logprobs: list[float]
    """One for each token, as `Sample.logprobs`."""
    finish_reason: str
    weights: list[tuple[int, int, int]]
    """`WeightsSpan` of the tokens; starts count from the first drawn one."""
    digest: str
    """Digest of the history that ends with this reply; see `history_digest`."""
    measure: int
    """Length of this history: messages, or characters."""
    tail: str = ""
    """Drawn text that the reply is without: the stop string, and what was drawn with it."""


class CallHistory(NamedTuple):
    """The history that a reply ends, as in `CapturedChoice`."""

    measure: int
    digest: str
    tail: str = ""


class CapturedCall(msgspec.Struct, frozen=True, kw_only=True):
    """One call, as it is stored."""

    call: str
    """Id of its operation."""
    at: float
    """When it was answered, in seconds since the epoch."""
    parent: tuple[str, int] | None
    """The reply whose sequence it continues: its call, and the choice; None: it begins one."""
    prompt: list[int]
    """The prompt's tokens behind the parent's."""
    choices: list[CapturedChoice]


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedReply:
    """A captured reply, with which later prompts may begin."""

    parent: tuple[str, int]
    """Its call, and the choice."""
    before: list[list[int]]
    """Parts of the sequence up to the reply. All replies of a call share them."""
    drawn: list[int]
    """The reply's own tokens."""
    measure: int
    digest: str
    tail: str

    @property
    def tokens(self) -> list[int]:
        """All tokens of the sequence, up to the last drawn one."""
        return [token for part in (*self.before, self.drawn) for token in part]

    @property
    def length(self) -> int:
        """The number of `tokens`."""
        return sum(map(len, self.before)) + len(self.drawn)

    def begins(self, tokens: list[int]) -> bool:
        """Whether `tokens` begin with those of the sequence."""
        at = 0
        for part in (*self.before, self.drawn):
            if tokens[at : at + len(part)] != part:
                return False
            at += len(part)
        return True


def history_digest(kind: str, history: Any, settings: Mapping[str, Any] | None = None) -> str:
    """Digest of a history of messages (`chat`) or of a text (`text`) under the template's
    settings."""
    plain = json.dumps([kind, history, settings or {}], sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(plain.encode()).hexdigest()


def decode_calls(rows: Sequence[bytes]) -> list[CapturedCall]:
    """The calls, oldest first."""
    found = [msgspec.json.decode(row, type=CapturedCall) for row in rows]
    return sorted(found, key=lambda call: (call.at, call.call))


def make_call(
    call: str,
    at: float,
    parent: CapturedReply | None,
    prompt: Sequence[int],
    result: GenerateResult,
    *,
    histories: Sequence[CallHistory],
) -> CapturedCall:
    """The row of a call with one prompt. `histories`: one for each sample."""
    behind = 0 if parent is None else parent.length
    choices = [
        CapturedChoice(
            tokens=sample.tokens,
            logprobs=sample.logprobs.tolist(),
            finish_reason=sample.finish_reason,
            weights=[(span.start, span.version, span.trainer_step) for span in sample.weights],
            **history._asdict(),
        )
        for sample, history in zip(result.samples[0], histories, strict=True)
    ]
    return CapturedCall(
        call=call,
        at=at,
        parent=None if parent is None else parent.parent,
        prompt=list(prompt[behind:]),
        choices=choices,
    )


def replies(calls: Sequence[CapturedCall]) -> list[CapturedReply]:
    """All replies of a trajectory. One whose parent is missing is left out."""
    by_call = {call.call: call for call in calls}
    found = []
    for call in calls:
        path = _path(call, by_call)
        if path is None:
            continue
        for index, choice in enumerate(call.choices):
            found.append(
                CapturedReply(
                    parent=(call.call, index),
                    before=path,
                    drawn=choice.tokens,
                    measure=choice.measure,
                    digest=choice.digest,
                    tail=choice.tail,
                )
            )
    return found


def segments(calls: Sequence[CapturedCall]) -> Iterator[dict[str, Any]]:
    """The segments of a trajectory as plain values, by the time of their last calls: the fields of
    `CapturedSegment`."""
    by_call = {call.call: call for call in calls}
    continued = {call.parent for call in calls if call.parent is not None}
    return (
        _segment(call, index, by_call)
        for call in calls
        for index in range(len(call.choices))
        if (call.call, index) not in continued and _path(call, by_call) is not None
    )


def _path(call: CapturedCall, by_call: Mapping[str, CapturedCall]) -> list[list[int]] | None:
    """The parts of the sequence up to the end of a call's prompt; None: one is missing."""
    parts = [call.prompt]
    while call.parent is not None:
        name, choice = call.parent
        if (before := by_call.get(name)) is None:
            return None
        call = before
        parts += [call.choices[choice].tokens, call.prompt]
    return parts[::-1]


def _segment(call: CapturedCall, index: int, by_call: Mapping[str, CapturedCall]) -> dict[str, Any]:
    turns = [(call, index)]
    while turns[-1][0].parent is not None:
        name, choice = turns[-1][0].parent
        turns.append((by_call[name], choice))
    tokens: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    weights: list[tuple[int, int, int]] = []
    for turn, at in reversed(turns):
        drawn = turn.choices[at]
        tokens += turn.prompt
        weights += [(len(tokens) + start, seq, step) for start, seq, step in drawn.weights]
        tokens += drawn.tokens
        mask += [0] * len(turn.prompt) + [1] * len(drawn.tokens)
        logprobs += [0.0] * len(turn.prompt) + drawn.logprobs
    return {
        "tokens": tokens,
        "mask": mask,
        "logprobs": logprobs,
        "weights": weights,
        "finish_reason": call.choices[index].finish_reason,
        "operations": [turn.call for turn, _ in reversed(turns)],
    }
