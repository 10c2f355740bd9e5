"""Messages between a node and the head's join service.

A connection carries one request and one answer. Each is JSON after its length:

    u32 length (big-endian) | JSON
"""

import asyncio
import struct
from typing import Any, TypeVar

import msgspec

from plexrl.errors import (
    ClockDifferenceError,
    ConnectionLostError,
    InvalidRequestError,
    PayloadTooLargeError,
    PlexRLError,
    from_wire,
)

MESSAGE_BYTES_MAX = 64 << 10
CLOCK_DIFFERENCE_S_MAX = 12 * 3600.0
"""Difference of two machines' clocks that is accepted. Certificates are valid from a day before
they are made, so half of that leaves a margin for clocks that drift on."""
_LENGTH = struct.Struct(">I")
AnswerT = TypeVar("AnswerT", bound="msgspec.Struct")


class JoinRequest(msgspec.Struct, kw_only=True):
    """Base of the requests."""


class AskAuthority(JoinRequest, tag_field="method", tag="authority"):
    """For the authority's certificate, which the client compares with its token before it trusts
    this head."""


class Join(JoinRequest, tag_field="method", tag="join"):
    """To become a node, with a token."""

    secret: str
    node: str
    request: str
    """Signing request (PEM)."""
    clock: float
    """The node's clock, in seconds since the epoch."""
    host: str = ""
    """Address at which other machines reach the node."""


class Renew(JoinRequest, tag_field="method", tag="renew"):
    """For a new certificate, or without a signing request only for the present settings. Needs the
    node's certificate, as do the requests below."""

    clock: float
    request: str = ""
    host: str = ""


class Drain(JoinRequest, tag_field="method", tag="drain"):
    """To move all work off the node; repeated until nothing is left."""


class Undrain(JoinRequest, tag_field="method", tag="undrain"):
    """To take new work again."""


class Leave(JoinRequest, tag_field="method", tag="leave"):
    """To be a node no longer."""


AnyRequest = AskAuthority | Join | Renew | Drain | Undrain | Leave


class AuthorityAnswer(msgspec.Struct, kw_only=True):
    """The authority, before the client trusts this head."""

    ca: str
    """Certificate (PEM)."""
    clock: float
    """The head's clock, in seconds since the epoch."""


class Membership(msgspec.Struct, kw_only=True):
    """The cluster as a node knows it."""

    ca: str
    """Certificates of the authorities to trust (PEM)."""
    certificate: str = ""
    """The node's certificate (PEM); empty if none was asked for."""
    schedulers: list[str]
    """Addresses of the scheduler and its standbys."""
    routers: list[str]
    """URLs of the API."""
    ticket_key: str
    """Key that signs the tickets of all nodes' StateManagers, in base64."""
    data_url: str = ""
    """Where routers keep payloads; empty: on the head."""
    checkpoint_url: str = ""
    """Where checkpoints go; empty: into the node's data directory."""


class DrainProgress(msgspec.Struct, kw_only=True):
    """The work that a drained node still has."""

    gpus_reserved: int
    groups: list[str]


class Done(msgspec.Struct, kw_only=True):
    """An answer without content."""


async def read_message(reader: asyncio.StreamReader) -> bytes:
    """The next message's JSON.

    Raises:
        ConnectionLostError: the connection ended.
        PayloadTooLargeError: the message is longer than `MESSAGE_BYTES_MAX`.
    """
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if length > MESSAGE_BYTES_MAX:
            raise PayloadTooLargeError(
                f"a message of {length} bytes: at most {MESSAGE_BYTES_MAX} are read"
            )
        return await reader.readexactly(length)
    except (asyncio.IncompleteReadError, OSError) as error:
        raise ConnectionLostError(f"the other side closed the connection: {error}") from error


async def write_message(writer: asyncio.StreamWriter, message: Any) -> None:
    """Write one message."""
    body = msgspec.json.encode(message)
    writer.write(_LENGTH.pack(len(body)) + body)
    try:
        await writer.drain()
    except OSError as error:
        raise ConnectionLostError(f"the other side closed the connection: {error}") from error


def parse_request(body: bytes) -> AnyRequest:
    """The request in a message.

    Raises:
        InvalidRequestError: it is none.
    """
    try:
        found: AnyRequest = msgspec.json.decode(body, type=AnyRequest)
        return found
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"this is no request to a join service: {error}") from error


def answer_of(result: msgspec.Struct | PlexRLError) -> dict[str, Any]:
    """The message for a result or an error."""
    if isinstance(result, PlexRLError):
        return {"error": result.to_wire()}
    return {"result": result}


def parse_answer(body: bytes, kind: type[AnswerT]) -> AnswerT:
    """The result in an answer.

    Raises:
        PlexRLError: the other side's error.
        InvalidRequestError: it is no answer.
    """
    try:
        found = msgspec.json.decode(body, type=dict[str, Any])
        if "error" in found:
            raise from_wire(found["error"])
        return msgspec.convert(found.get("result"), kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidRequestError(
            f"the answer is not that of a join service ({error}): check the address; `plexrl up` "
            "prints it"
        ) from error


def clock_error(difference_s: float) -> ClockDifferenceError:
    """The error for a node whose clock is `difference_s` seconds ahead of the head's."""
    ahead = "ahead of" if difference_s > 0 else "behind"
    return ClockDifferenceError(
        f"the clock of the node is {abs(difference_s):.0f} s {ahead} the head's, more than the "
        f"{CLOCK_DIFFERENCE_S_MAX:.0f} s that certificates allow: set the clocks of both "
        "machines, for example with `timedatectl set-ntp true`",
        difference_s=difference_s,
    )
