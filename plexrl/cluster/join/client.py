"""A node's requests to the join service of its head."""

import asyncio
import hashlib
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from plexrl.cluster.join import messages
from plexrl.cluster.join.tokens import JoinToken
from plexrl.errors import (
    AuthenticationError,
    ConnectionLostError,
    JoinTokenError,
    PlexRLError,
    UnavailableError,
)
from plexrl.wire.links.address import TlsAddress
from plexrl.wire.links.credentials import Credentials, Role, TlsFiles, identity_of

EXCHANGE_S = 20.0
AnswerT = TypeVar("AnswerT", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """A successful join."""

    membership: messages.Membership
    host: str
    """Address of this machine from which it reached the head."""


async def join(
    head: TlsAddress,
    token: JoinToken,
    *,
    node: str,
    request: bytes,
    host: str = "",
    clock: Callable[[], float] = time.time,
) -> Joined:
    """Become a node: `request` is the signing request (PEM) for its key. Repeating a request whose
    answer was lost is safe.

    Raises:
        AuthenticationError: the machine at `head` is not the head of the token's cluster.
        ClockDifferenceError: the machines' clocks differ too much.
        ConflictError: the name is that of a live node.
        JoinTokenError: the token is used, expired, revoked or of another cluster.
        UnavailableError: nothing answers at `head`.
    """
    asked, host_here = await _exchange(
        head, _unverified(), messages.AskAuthority(), messages.AuthorityAnswer
    )
    _check_fingerprint(head, asked.ca, token)
    difference_s = clock() - asked.clock
    if not abs(difference_s) <= messages.CLOCK_DIFFERENCE_S_MAX:
        raise messages.clock_error(difference_s)
    sent = messages.Join(
        secret=token.secret,
        node=node,
        request=request.decode(),
        clock=clock(),
        host=host or host_here,
    )
    membership, _ = await _exchange(head, _trusting(asked.ca), sent, messages.Membership)
    return Joined(membership=membership, host=host_here)


class HeadClient:
    """Requests of a node that has joined."""

    def __init__(self, head: TlsAddress, files: TlsFiles) -> None:
        self._head = head
        self._files = files

    async def renew(
        self, request: bytes = b"", *, host: str = "", clock: Callable[[], float] = time.time
    ) -> messages.Membership:
        """The present settings of the cluster, and with a signing request a new certificate.

        Raises:
            ClockDifferenceError: the machines' clocks differ too much.
            PermissionDeniedError: the node is no member any more.
            UnavailableError: the head does not answer.
        """
        sent = messages.Renew(clock=clock(), request=request.decode(), host=host)
        return await self._ask(sent, messages.Membership)

    async def drain(self) -> messages.DrainProgress:
        """Begin a drain, or ask how far it is. Raises as `renew`."""
        return await self._ask(messages.Drain(), messages.DrainProgress)

    async def undrain(self) -> messages.DrainProgress:
        """End a drain. Raises as `renew`."""
        return await self._ask(messages.Undrain(), messages.DrainProgress)

    async def leave(self) -> None:
        """End the membership. Raises as `renew`."""
        await self._ask(messages.Leave(), messages.Done)

    async def _ask(self, request: messages.JoinRequest, kind: type[AnswerT]) -> AnswerT:
        context = Credentials(self._files).client_context()
        answer, _ = await _exchange(self._head, context, request, kind)
        return answer


async def _exchange(
    head: TlsAddress,
    context: ssl.SSLContext,
    request: messages.JoinRequest,
    kind: type[AnswerT],
) -> tuple[AnswerT, str]:
    """(answer, this machine's address on the connection)."""
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(EXCHANGE_S):
            reader, writer = await asyncio.open_connection(head.host, head.port, ssl=context)
            if context.verify_mode == ssl.CERT_REQUIRED:
                identity = identity_of(writer.get_extra_info("ssl_object").getpeercert())
                if identity.role != Role.HEAD:
                    raise AuthenticationError(
                        f"{head} is {identity} of the cluster, not its join service: use the "
                        "address that `plexrl up` prints"
                    )
            here = str(writer.get_extra_info("sockname")[0])
            await messages.write_message(writer, request)
            return messages.parse_answer(await messages.read_message(reader), kind), here
    except (TimeoutError, socket.gaierror, ConnectionLostError) as error:
        raise _no_answer(head, error) from error
    except ssl.SSLError as error:
        raise AuthenticationError(
            f"{head} and this machine do not trust each other: {error.reason or error}: the head "
            "belongs to another cluster, the node's certificate has expired, or a clock is wrong; "
            "join again with a new token of `plexrl node token`"
        ) from error
    except OSError as error:
        raise _no_answer(head, error) from error
    finally:
        if writer is not None:
            writer.transport.abort()


def _no_answer(head: TlsAddress, error: Exception) -> PlexRLError:
    reason = f"no answer in {EXCHANGE_S:g} s" if isinstance(error, TimeoutError) else str(error)
    return UnavailableError(
        f"the head does not answer at {head} ({reason}): check that `plexrl up --tls` runs there "
        "and that firewalls let the port through",
        retry_after_s=1.0,
    )


def _check_fingerprint(head: TlsAddress, ca: str, token: JoinToken) -> None:
    try:
        found = hashlib.sha256(ssl.PEM_cert_to_DER_cert(ca)).hexdigest()
    except ValueError as error:
        raise AuthenticationError(f"{head} sent no certificate: {error}") from error
    if found != token.fingerprint:
        raise JoinTokenError(
            f"the token is of another cluster than {head}: its authority has the fingerprint "
            f"{token.fingerprint[:12]}…, the head's has {found[:12]}…; the token was not sent. "
            "Check the address, and run `plexrl node token` on that head",
            reason="foreign",
        )


def _unverified() -> ssl.SSLContext:
    """A context for the first request, whose answer is checked by its fingerprint."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _trusting(ca: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the head's identity is in a URI
    context.load_verify_locations(cadata=ca)
    return context
