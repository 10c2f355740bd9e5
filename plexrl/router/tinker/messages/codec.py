"""The bodies of the Tinker API: protobuf messages, JSON and the rule on unknown fields.

The SDK sends `forward_backward` as protobuf, and reads the results of `forward_backward` and
`asample` as protobuf; all else is JSON. `MESSAGES` names the fields that PlexRL uses, with the
numbers that the SDK's own generated module has.

The rule on fields that PlexRL does not know: a field without a value (null, false, 0, empty) is
ignored, since it asks for nothing. One with a value is refused by its name, or by its number in
protobuf, since it would ask for something that does not happen.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet
from pydantic import BaseModel, ConfigDict, ValidationError

from plexrl.errors import InvalidRequestError
from plexrl.router.tinker.messages.fields import check_fields
from plexrl.wire.tensors import Array

PROTOBUF = "application/x-protobuf"
FLOAT32, INT64 = 1, 2
"""Numbers of dtypes."""
DTYPES: Mapping[int, np.dtype[Any]] = {
    FLOAT32: np.dtype("<f4"),
    INT64: np.dtype("<i8"),
    3: np.dtype("<i4"),
}
STOP, LENGTH = 0, 1
"""Numbers of the reasons for which a sample ended."""
NO_LOGPROB = -99999.0
"""Logprob of an empty place of top-k logprobs."""

MESSAGES = {
    "EncodedText": "tokens:1:bytes",
    "Image": "",
    "Audio": "",
    "Chunk": "encoded_text:1:EncodedText image:2:Image audio:3:Audio",
    "Sparse": "",
    "Tensor": "dense:1:bytes sparse:2:Sparse dtype:3:int32 shape:4:int64*",
    "TensorEntry": "key:1:string value:2:Tensor",
    "Span": "",
    "Datum": "model_input:1:Chunk* loss_fn_inputs:2:TensorEntry* spans:3:Span* input_spans:4:Span*",
    "Number": "key:1:string value:2:double",
    "Setting": "number:1:double text:2:string",
    "SettingEntry": "key:1:string value:2:Setting",
    "ForwardBackwardRequest": "model_id:1:string seq_id:2:int32 data:3:Datum* loss_fn:4:string "
    "numbers:5:Number* forward_only:6:bool settings:7:SettingEntry*",
    "BatchedTensor": "data:1:bytes offsets:2:bytes dtype:3:int32 trailing_shape:4:int64*",
    "BatchedEntry": "key:1:string value:2:BatchedTensor",
    "ArrayRecord": "type_tag:1:string fields:2:BatchedEntry* num_datums:3:int64",
    "ForwardBackwardOutput": "loss_fn_output_type:1:string loss_fn_outputs:2:ArrayRecord* "
    "metrics:3:Number*",
    "Top": "token_ids:1:bytes logprobs:2:bytes k:3:uint32 length:4:uint32",
    "Sequence": "stop_reason:1:int32 tokens:2:bytes logprobs:3:bytes top:4:Top",
    "SampleResponse": "sequences:1:Sequence* prompt_logprobs:2:bytes top_prompt:3:Top",
}
"""Fields of each message as `name:number:type`; `*` marks a repeated field. Maps are lists of
entries, which have the same bytes, and enumerations are integers. A message without fields here is
refused wherever it has a value."""


def message_classes(package: str, messages: Mapping[str, str]) -> Mapping[str, type[Message]]:
    """Classes of protobuf messages, whose fields are written as in `MESSAGES`."""
    file = descriptor_pb2.FileDescriptorProto(name=f"{package}.proto", package=package)
    file.syntax = "proto3"
    kinds = descriptor_pb2.FieldDescriptorProto
    for name, fields in messages.items():
        message = file.message_type.add(name=name)
        for field in fields.split():
            label, number, kind = field.split(":")
            repeated = kind.endswith("*")
            kind = kind.removesuffix("*")
            added = message.field.add(name=label, number=int(number))
            added.label = kinds.LABEL_REPEATED if repeated else kinds.LABEL_OPTIONAL
            if kind in messages:
                added.type, added.type_name = kinds.TYPE_MESSAGE, f".{package}.{kind}"
            else:
                added.type = kinds.Type.Value(f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = pool.FindFileByName(file.name).message_types_by_name
    return {name: message_factory.GetMessageClass(found[name]) for name in messages}


_CLASSES = message_classes("plexrl.tinker", MESSAGES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Datum:
    """One row of a `forward_backward`."""

    tokens: Array
    """int32 `[n]`: the model's input."""
    inputs: Mapping[str, Array]
    """What the loss needs, by name; each `[n]`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """A decoded `forward_backward`."""

    model_id: str
    seq_id: int
    loss: str
    settings: Mapping[str, float | str]
    forward_only: bool
    data: tuple[Datum, ...]
    error: InvalidRequestError | None = None
    """Why the rest was not read. The request has a number, which it uses."""


Json = TypeVar("Json", bound="JsonRequest")


class JsonRequest(BaseModel):
    """A JSON request. Fields that the class does not name follow the rule of this module."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    @classmethod
    def read(cls: type[Json], body: bytes) -> Json:
        """Decode a body.

        Raises:
            InvalidRequestError: it is no such request, or asks for what PlexRL does not know.
        """
        try:
            found = cls.model_validate_json(body or b"{}")
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise InvalidRequestError(f"{where or 'the body'}: {first['msg']}") from error
        for where, name, value in _extras(found, ""):
            if value not in (None, False, 0, "", [], {}):
                raise InvalidRequestError(
                    f"PlexRL does not know {where}{name}={value!r:.100}: leave it out",
                    parameter=name,
                )
        return found


def _extras(request: BaseModel, where: str) -> Iterator[tuple[str, str, Any]]:
    for name, value in (request.model_extra or {}).items():
        if name != "type":
            yield where, name, value
    for name in type(request).model_fields:
        inner = getattr(request, name)
        for each in inner if isinstance(inner, list) else [inner]:
            if isinstance(each, BaseModel):
                yield from _extras(each, f"{where}{name}.")


def read_train_batch(body: bytes) -> TrainBatch:
    """Decode the body of `forward_backward`.

    What it has that PlexRL cannot read is its `error`, without any row.

    Raises:
        InvalidRequestError: it is no such message, or has too many fields.
    """
    check_fields(body, _CLASSES["ForwardBackwardRequest"].DESCRIPTOR)
    message: Any = _CLASSES["ForwardBackwardRequest"]()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise InvalidRequestError(f"the body is no ForwardBackwardRequest: {error}") from error
    settings: dict[str, float | str] = {number.key: number.value for number in message.numbers}
    for each in message.settings:
        settings[each.key] = each.value.text or each.value.number
    data: tuple[Datum, ...] = ()
    refusal: InvalidRequestError | None = None
    try:
        _refuse_unknown(message)
        data = tuple(_datum(row, each) for row, each in enumerate(message.data))
    except InvalidRequestError as error:
        refusal = error
    return TrainBatch(
        model_id=message.model_id,
        seq_id=message.seq_id,
        loss=message.loss_fn,
        settings=settings,
        forward_only=message.forward_only,
        data=data,
        error=refusal,
    )


def _refuse_unknown(message: Message) -> None:
    unknown = sorted({each.field_number for each in UnknownFieldSet(message)})
    if unknown:
        raise InvalidRequestError(
            f"{message.DESCRIPTOR.name} has field {unknown[0]}, which PlexRL does not know: an SDK "
            "of version 0.38 sends none"
        )


def _datum(row: int, message: Any) -> Datum:
    _refuse_unknown(message)
    if message.spans or message.input_spans:
        raise InvalidRequestError(
            f"row {row} has provenance spans, which are for loss_fn='stable_reinforce': leave them "
            "out, and use loss_fn='importance_sampling'"
        )
    parts = []
    for chunk in message.model_input:
        if chunk.HasField("image") or chunk.HasField("audio"):
            raise InvalidRequestError(f"row {row} has an image or audio: send tokens only")
        parts.append(_numbers(row, "encoded_text", chunk.encoded_text.tokens, np.dtype("<i4")))
    tokens = np.concatenate(parts) if parts else np.empty(0, "<i4")
    inputs = {each.key: _array(row, each.key, each.value) for each in message.loss_fn_inputs}
    return Datum(tokens=tokens, inputs=inputs)


def _array(row: int, name: str, message: Any) -> Array:
    dtype = DTYPES.get(message.dtype)
    shape = list(message.shape) or None
    if message.HasField("sparse") or (shape is not None and len(shape) != 1):
        raise InvalidRequestError(
            f"{name} of row {row} has shape {shape or 'sparse'}: give one value for each token; "
            "several targets for a token are not supported"
        )
    if dtype is None:
        raise InvalidRequestError(f"{name} of row {row} is neither float32 nor int64")
    return _numbers(row, name, message.dense, dtype)


def _numbers(row: int, name: str, dense: bytes, dtype: np.dtype[Any]) -> Array:
    if len(dense) % dtype.itemsize:
        raise InvalidRequestError(
            f"{name} of row {row} has {len(dense)} bytes, which is no multiple of the "
            f"{dtype.itemsize} bytes of {dtype}"
        )
    found: Array = np.frombuffer(dense, dtype)
    return found


def train_output(rows: Sequence[Array], metrics: Mapping[str, float]) -> bytes:
    """A `ForwardBackwardOutput` with the logprobs of each row's targets, float32 `[n]`."""
    message: Any = _CLASSES["ForwardBackwardOutput"](loss_fn_output_type="ArrayRecord")
    record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(rows))
    field = record.fields.add(key="logprobs").value
    ends = np.cumsum([0, *(row.size * 4 for row in rows)], dtype="<i8")
    field.data = b"".join(np.ascontiguousarray(row, "<f4").tobytes() for row in rows)
    field.offsets, field.dtype = ends.tobytes(), FLOAT32
    for name, value in metrics.items():
        message.metrics.add(key=name, value=value)
    return bytes(message.SerializeToString())


@dataclass(frozen=True, slots=True, kw_only=True)
class TopRows:
    """Likeliest tokens in the place of each token."""

    ids: Array
    """int32 `[n, k]`."""
    logprobs: Array
    """float32 `[n, k]`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledRow:
    """One sample, with its logprobs under the model itself."""

    stop_reason: int
    tokens: Array
    logprobs: Array
    top: TopRows | None


def sample_output(
    samples: Sequence[SampledRow], prompt_logprobs: Array | None, top_prompt: TopRows | None
) -> bytes:
    """A `SampleResponse`. `prompt_logprobs` float32 `[n]` are NaN where there is none."""
    message: Any = _CLASSES["SampleResponse"]()
    for sample in samples:
        added = message.sequences.add(stop_reason=sample.stop_reason)
        added.tokens = np.ascontiguousarray(sample.tokens, "<i4").tobytes()
        added.logprobs = np.ascontiguousarray(sample.logprobs, "<f4").tobytes()
        if sample.top is not None:
            _write_top(added.top, sample.top)
    if prompt_logprobs is not None:
        message.prompt_logprobs = np.ascontiguousarray(prompt_logprobs, "<f4").tobytes()
    if top_prompt is not None:
        _write_top(message.top_prompt, top_prompt)
    return bytes(message.SerializeToString())


def _write_top(message: Any, rows: TopRows) -> None:
    # Entries that were not computed have id -1.
    empty = rows.ids < 0
    message.token_ids = np.where(empty, 0, rows.ids).astype("<i4").tobytes()
    message.logprobs = np.where(empty, NO_LOGPROB, rows.logprobs).astype("<f4").tobytes()
    message.length, message.k = rows.ids.shape
