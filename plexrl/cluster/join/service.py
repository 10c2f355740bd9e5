"""The join service of the head: admits nodes, renews their certificates, and lets them leave.

It listens with TLS on a port of its own, in the supervisor, which alone holds the authority's key.
Clients without a certificate may ask for the authority's certificate, and join with a token. All
other requests need a node's certificate and concern that node only.

A client proves the head before it sends the secret: it asks for the authority's certificate,
compares the fingerprint with its token, and connects again, trusting this authority only.
"""

import asyncio
import hashlib
import logging
import re
import ssl
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol, assert_never

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from plexrl.cluster.join import messages
from plexrl.cluster.join.attempts import FailedAttempts
from plexrl.cluster.join.authority import LIFE, Authority
from plexrl.cluster.join.ledger import JoinedNode, Ledger, Members, admit, valid
from plexrl.cluster.join.tokens import secret_digest
from plexrl.errors import (
    AuthenticationError,
    ConflictError,
    ConnectionLostError,
    InvalidRequestError,
    NotFoundError,
    PermissionDeniedError,
    PlexRLError,
    UnavailableError,
)
from plexrl.wire.links.credentials import (
    Identity,
    Role,
    TlsFiles,
    identity_of,
    tls_context,
)
from plexrl.wire.links.followed_files import FollowedFiles, renew_at_handshakes
from plexrl.wire.links.handshakes import start_tls_server

LOG = logging.getLogger(__name__)

EXCHANGE_S = 15.0
"""Time limit for one connection."""
_NODE_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")


class JoinedCluster(Protocol):
    """The running cluster as the service sees it."""

    async def live_nodes(self) -> Collection[str]:
        """Names of the nodes whose agent is connected.

        Raises:
            PlexRLError: the cluster does not answer now.
        """
        ...

    async def remove(self, node: str) -> None:
        """Forget a node that has no work.

        Raises:
            PlexRLError: it has work, or the cluster does not answer now.
        """
        ...

    async def drain(self, node: str, *, is_draining: bool) -> messages.DrainProgress:
        """Begin or end a drain; returns what is left on the node.

        Raises:
            PlexRLError: there is no such node, or the cluster does not answer now.
        """
        ...


@dataclass(frozen=True, slots=True)
class _Client:
    """The other end of a connection."""

    address: str
    node: str = ""
    """The node that its certificate names; empty: it showed none."""
    key: str = ""
    """SHA-256 of the certificate's public key."""
    certificate: x509.Certificate | None = None


class JoinService:
    """Serves one cluster's join port."""

    def __init__(
        self,
        authority: Authority,
        ledger: Ledger,
        files: TlsFiles,
        cluster: JoinedCluster,
        membership: Callable[[], messages.Membership],
        reserved: Collection[str] = (),
    ) -> None:
        """`files` are of an identity with the role head; nodes named in `reserved` are the head's
        own. `membership` is what every node is told."""
        self._authority = authority
        self._ledger = ledger
        self._cluster = cluster
        self._membership = membership
        self._reserved = frozenset(reserved)
        self._attempts = FailedAttempts()
        followed = (files.ca, files.certificate, files.key)
        # A machine that joins has no certificate.
        self._context = FollowedFiles(
            followed, lambda: tls_context(files, ssl.PROTOCOL_TLS_SERVER, ssl.CERT_OPTIONAL)
        )
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port.

        Raises:
            UnavailableError: the address cannot be listened on.
        """
        context = self._context.newest()
        renew_at_handshakes(context, self._context.newest)
        try:
            self._server = await start_tls_server(
                self._serve, host, port, context, handshake_s=EXCHANGE_S
            )
        except OSError as error:
            raise UnavailableError(
                f"the join service cannot listen on {host}:{port}: {error}: choose another address "
                "with --host, or another port with --join-port"
            ) from error
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()
            with suppress(TimeoutError):
                async with asyncio.timeout(EXCHANGE_S):
                    await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        address = str(writer.get_extra_info("peername")[0])
        try:
            async with asyncio.timeout(EXCHANGE_S):
                answer = messages.answer_of(await self._outcome(reader, writer, address))
                await messages.write_message(writer, answer)
        except (TimeoutError, ConnectionLostError) as error:
            LOG.info("a connection from %s ended early: %s", address, error)
        finally:
            writer.close()

    async def _outcome(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: str
    ) -> msgspec.Struct | PlexRLError:
        try:
            request = messages.parse_request(await messages.read_message(reader))
            tls = writer.get_extra_info("ssl_object")
            return await self._answer(request, _client(tls, address))
        except ConnectionLostError:
            raise
        except PlexRLError as error:
            LOG.warning("a request from %s was refused: %s", address, error)
            if isinstance(error, AuthenticationError):
                self._attempts.add(address, asyncio.get_running_loop().time())
            return error

    async def _answer(self, request: messages.AnyRequest, client: _Client) -> msgspec.Struct:
        if isinstance(request, messages.AskAuthority):
            return messages.AuthorityAnswer(ca=self._authority.pem.decode(), clock=time.time())
        if isinstance(request, messages.Join):
            self._attempts.check(client.address, asyncio.get_running_loop().time())
            return await self._join(request, client)
        if not client.node:
            raise AuthenticationError("show the certificate of a node, or join with a token first")
        await asyncio.to_thread(lambda: _member(self._ledger.read(), client))
        match request:
            case messages.Renew():
                return await asyncio.to_thread(self._renew, request, client)
            case messages.Drain():
                return await self._cluster.drain(client.node, is_draining=True)
            case messages.Undrain():
                return await self._cluster.drain(client.node, is_draining=False)
            case messages.Leave():
                await asyncio.to_thread(self._forget, client)
                try:
                    await self._cluster.remove(client.node)
                except PlexRLError as error:
                    LOG.warning("%s stays in the list of nodes: %s", client.node, error)
                return messages.Done()
            case _:
                assert_never(request)

    async def _join(self, request: messages.Join, client: _Client) -> messages.Membership:
        _check_clock(request.clock)
        self._check_name(request.node)
        try:
            live = await self._cluster.live_nodes()
        except PlexRLError as error:
            raise UnavailableError(
                f"the head cannot tell yet whether {request.node!r} is free ({error.message}): "
                "try again in a few seconds",
                retry_after_s=2.0,
            ) from error
        is_known = request.node in (await asyncio.to_thread(self._ledger.read)).nodes
        told = await asyncio.to_thread(self._admit, request, client, request.node in live)
        if not is_known:
            # A former node of this name was drained when it left.
            try:
                await self._cluster.drain(request.node, is_draining=False)
            except NotFoundError:
                pass
            except PlexRLError as error:
                LOG.warning("a drain of %s may still be in force: %s", request.node, error)
        return told

    def _admit(self, request: messages.Join, client: _Client, is_live: bool) -> messages.Membership:
        node, key = request.node, _request_key(request.request)
        with self._ledger.change() as members:
            digest = secret_digest(request.secret)
            admit(members, digest, node, key, now=time.time(), is_live=is_live)
            # Signed before the record is written: a request that cannot be signed spends nothing.
            certificate = self._sign(request.request, node)
            former = members.nodes.get(node)
            own = former.certificates if former is not None and key in former.keys else {}
            is_replaced = not own and members.forget(node)
            members.nodes[node] = JoinedNode(
                keys=[key],
                joined_at=time.time(),
                certified_until=time.time() + LIFE.total_seconds(),
                host=request.host or client.address,
                certificates=own | _entry(certificate),
            )
        if is_replaced:
            self._ledger.publish(self._authority)
        LOG.warning("node %s has joined from %s", node, client.address)
        return self._told(certificate)

    def _renew(self, request: messages.Renew, client: _Client) -> messages.Membership:
        if not request.request:
            self._record(client)
            return self._told(b"")
        _check_clock(request.clock)
        key = _request_key(request.request)
        with self._ledger.change() as members:
            # Again, because the operator may have revoked the membership meanwhile.
            member = _member(members, client)
            certificate = self._sign(request.request, client.node)
            # The node keeps its former certificate until it has this answer.
            member.keys = [client.key, key] if key != client.key else [key]
            member.certified_until = time.time() + LIFE.total_seconds()
            member.host = request.host or client.address
            known = member.certificates | _entry(client.certificate) | _entry(certificate)
            member.certificates = valid(known)
        LOG.info("the certificate of node %s was renewed", client.node)
        return self._told(certificate)

    def _record(self, client: _Client) -> None:
        """Note the client's certificate, if the record of an earlier version lacks it."""
        entry = _entry(client.certificate)
        if not entry.keys() <= _member(self._ledger.read(), client).certificates.keys():
            with self._ledger.change() as members:
                _member(members, client).certificates |= entry

    def _sign(self, request: str, node: str) -> bytes:
        # No host names: with one, a node could pass for the API to clients that check only that.
        return self._authority.sign(request.encode(), Identity(Role.NODE, node))

    def _told(self, certificate: bytes) -> messages.Membership:
        return msgspec.structs.replace(self._membership(), certificate=certificate.decode())

    def _forget(self, client: _Client) -> None:
        with self._ledger.change() as members:
            # Again, because another machine may have taken the name meanwhile.
            _member(members, client)
            members.forget(client.node)
        self._ledger.publish(self._authority)
        LOG.warning("node %s has left", client.node)

    def _check_name(self, node: str) -> None:
        if _NODE_NAME.fullmatch(node) is None:
            raise InvalidRequestError(
                f"{node!r} is no name for a node: use 1 to 63 letters, digits, dots, dashes and "
                "underscores, with a letter or digit at both ends"
            )
        if node in self._reserved:
            raise ConflictError(f"{node!r} is a node of the head itself: choose another --name")


def _member(members: Members, client: _Client) -> JoinedNode:
    """The client's membership. Raises `PermissionDeniedError`."""
    member = members.nodes.get(client.node)
    if member is None:
        raise PermissionDeniedError(
            f"node {client.node!r} is no member of this cluster any more: join again with a token"
        )
    if client.key not in member.keys:
        raise PermissionDeniedError(
            f"another machine has joined as {client.node!r} since: join again with a token and "
            "another --name"
        )
    if not members.revoked.keys().isdisjoint(_entry(client.certificate)):
        raise PermissionDeniedError(
            f"the certificate of node {client.node!r} is revoked: join again with a token"
        )
    return member


def _check_clock(clock: float) -> None:
    difference_s = clock - time.time()
    if not abs(difference_s) <= messages.CLOCK_DIFFERENCE_S_MAX:
        raise messages.clock_error(difference_s)


def _client(tls: ssl.SSLObject, address: str) -> _Client:
    body = tls.getpeercert(binary_form=True)
    if not body:
        return _Client(address)
    identity = identity_of(tls.getpeercert())
    if identity.role != Role.NODE:
        raise PermissionDeniedError(f"the join service is for nodes; the certificate is {identity}")
    certificate = x509.load_der_x509_certificate(body)
    return _Client(address, identity.name, _digest(certificate), certificate)


def _entry(certificate: x509.Certificate | bytes | None) -> dict[str, float]:
    """The certificate (or its PEM) as in `Member.certificates`."""
    if certificate is None:
        return {}
    if isinstance(certificate, bytes):
        certificate = x509.load_pem_x509_certificate(certificate)
    return {f"{certificate.serial_number:x}": certificate.not_valid_after_utc.timestamp()}


def _request_key(request: str) -> str:
    try:
        return _digest(x509.load_pem_x509_csr(request.encode()))
    except ValueError as error:
        raise InvalidRequestError(f"the signing request is malformed: {error}") from error


def _digest(signed: x509.Certificate | x509.CertificateSigningRequest) -> str:
    body = signed.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(body).hexdigest()
