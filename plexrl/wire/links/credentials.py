"""Certificates of a process: who it is, and whom it trusts.

Every process of a networked cluster has a certificate of the cluster's authority. The certificate
names the process by a URI, `plexrl://ROLE/NAME`, in its subjectAltName; nothing that a process says
about itself counts. Files are read again when they change, so certificates and the authority can be
replaced while processes run: new connections use the new files, open ones go on. Only links with a
process whose certificate is revoked are ended.
"""

import asyncio
import logging
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote, unquote, urlsplit
from weakref import WeakKeyDictionary

from plexrl.errors import AuthenticationError, InvalidRequestError
from plexrl.process.folders.operator_key import write_private
from plexrl.wire.links.followed_files import FollowedFiles, renew_at_handshakes
from plexrl.wire.links.tls_socket import TlsSocket, shut_down

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

LOG = logging.getLogger(__name__)

SCHEME = "plexrl"
WATCH_S = 2.0
"""Interval at which a process with open links looks for revoked certificates."""


class Role(StrEnum):
    """What a process is in the cluster."""

    SCHEDULER = "scheduler"
    ROUTER = "router"
    NODE = "node"
    """A node's agent, StateManager and workers."""
    ROLLOUT = "rollout"
    """The rollout service."""
    HEAD = "head"
    """The service at which nodes join."""
    LOCAL = "local"
    """A process of this machine and user, connected by a Unix socket. Never in a certificate."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Role and name of a process, from its certificate."""

    role: Role
    name: str = ""

    @property
    def uri(self) -> str:
        """The URI in the certificate's subjectAltName."""
        return f"{SCHEME}://{self.role}/{quote(self.name, safe='')}"

    def __str__(self) -> str:
        return f"{self.role} {self.name!r}" if self.name else str(self.role)


LOCAL = Identity(Role.LOCAL)
SCHEDULER = Identity(Role.SCHEDULER, "scheduler")
ROLLOUT = Identity(Role.ROLLOUT, "rollout")


def router_identity(index: int) -> Identity:
    """The identity of a head's router."""
    return Identity(Role.ROUTER, f"router{index}")


def identity_of(certificate: Mapping[str, Any] | None) -> Identity:
    """The identity in a verified certificate, as `ssl.SSLSocket.getpeercert` returns it.

    Raises:
        AuthenticationError: the certificate names no single process of a PlexRL cluster.
    """
    names = (certificate or {}).get("subjectAltName", ())
    uris = [value for kind, value in names if kind == "URI" and value.startswith(f"{SCHEME}://")]
    if len(uris) != 1:
        raise AuthenticationError(
            f"the certificate has {len(uris)} names of the form {SCHEME}://ROLE/NAME instead of "
            "one: use a certificate that `plexrl up` or `plexrl node join` made"
        )
    parts = urlsplit(uris[0])
    try:
        role = Role(parts.netloc)
    except ValueError:
        role = Role.LOCAL
    if role == Role.LOCAL:
        raise AuthenticationError(f"{uris[0]!r} names no role: it must be one of a process")
    return Identity(role, unquote(parts.path.removeprefix("/")))


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """Paths of PEM files."""

    ca: str
    """Certificates of the authorities to trust."""
    certificate: str
    """This process's certificate, followed by intermediate ones."""
    key: str
    """Its private key."""
    crl: str = ""
    """List of the certificates that an authority has revoked (CRL). The file need not exist: lists
    that the scheduler sends are stored there. Empty: no certificate is revoked."""


class RevocationList(NamedTuple):
    """The certificates that an authority has revoked."""

    number: int = 0
    """Increases from list to list; 0: there is none."""
    serials: frozenset[int] = frozenset()
    """Serial numbers of the certificates."""
    pem: str = ""


class _Loaded(NamedTuple):
    server: ssl.SSLContext
    client: ssl.SSLContext
    revoked: RevocationList


Connection = TlsSocket | ssl.SSLSocket | asyncio.StreamWriter
"""A connection after its handshake."""


class Credentials:
    """TLS contexts of a process, and its authenticated links. Thread-safe."""

    def __init__(self, files: TlsFiles) -> None:
        """Raises:
        InvalidRequestError: a file cannot be read, or they do not belong together.
        """
        self._files = files
        paths = [files.ca, files.certificate, files.key, files.crl]
        self._loaded = FollowedFiles([path for path in paths if path], self._load)
        self._lock = threading.Lock()
        self._links: WeakKeyDictionary[Connection, tuple[int, Callable[[], None]]] = (
            WeakKeyDictionary()
        )
        """Serial number of the other end's certificate, and what shuts the socket down."""
        self._is_watching = False

    @property
    def identity(self) -> Identity:
        """The identity in this process's own certificate."""
        from cryptography import x509

        names = self._own().extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
        return identity_of({"subjectAltName": [("URI", uri) for uri in uris]})

    @property
    def keeps_revoked(self) -> bool:
        """Whether there is a place for a list of revoked certificates."""
        return bool(self._files.crl)

    @property
    def revoked(self) -> RevocationList:
        """The newest list of revoked certificates."""
        return self._loaded.newest().revoked

    def check_expiry(self) -> None:
        """Check by this machine's clock that the own certificate is valid still. A server that
        finds it expired may end the connection without a word.

        Raises:
            AuthenticationError: it has expired.
        """
        end = self._own().not_valid_after_utc
        if end <= datetime.now(UTC):
            raise AuthenticationError(
                f"the certificate {self._files.certificate} expired at {end:%Y-%m-%d %H:%M} UTC: "
                "let the node join again, or set this machine's clock"
            )

    def _own(self) -> "Certificate":
        from cryptography import x509

        return x509.load_pem_x509_certificate(Path(self._files.certificate).read_bytes())

    def server_context(self) -> ssl.SSLContext:
        """A context that demands a certificate of the client. A server that keeps it follows
        changes of the files, because each handshake takes the newest context."""
        return self._loaded.newest().server

    def client_context(self) -> ssl.SSLContext:
        """A context that demands a certificate of the authority, whatever host name it has."""
        return self._loaded.newest().client

    def admit(self, certificate: Mapping[str, Any] | None, connection: Connection) -> Identity:
        """The process at the other end of a connection after its handshake. The connection is ended
        within `WATCH_S` seconds of the revocation of `certificate`.

        Raises:
            AuthenticationError: the certificate names no process of a cluster, or is revoked.
        """
        peer = identity_of(certificate)
        assert certificate is not None
        serial = int(certificate["serialNumber"], 16)
        with self._lock:
            # Before the check, so that no revocation falls in between.
            self._links[connection] = serial, _shutdown(connection)
            if self._files.crl and not self._is_watching:
                self._is_watching = True
                watched = weakref.ref(self)
                threading.Thread(target=_watch, args=(watched,), daemon=True).start()
        if serial in self.revoked.serials:
            raise AuthenticationError(
                f"the certificate of {peer} is revoked: the node has left the cluster or was "
                "removed; it may join again with a token of `plexrl node token`"
            )
        return peer

    def learn(self, pem: str) -> None:
        """Store a list of revoked certificates that another process has sent, if it is newer.

        Raises:
            InvalidRequestError: it is none of the trusted authorities.
            OSError: it cannot be stored.
        """
        if self.keeps_revoked and self._read_crl(pem.encode()).number > self.revoked.number:
            write_private(Path(self._files.crl), pem)
            self._end_revoked()

    def _end_revoked(self) -> None:
        revoked = self.revoked.serials
        with self._lock:
            found = [(link, *each) for link, each in self._links.items() if each[0] in revoked]
            for link, _, _ in found:
                del self._links[link]
        for _, serial, shutdown in found:
            # Its owner sees the end of the stream, whatever thread or event loop it has.
            with suppress(OSError):
                shutdown()
                LOG.warning("certificate %x is revoked: its link was ended", serial)

    def _load(self) -> _Loaded:
        server = tls_context(self._files, ssl.PROTOCOL_TLS_SERVER)
        renew_at_handshakes(server, self.server_context)
        client = tls_context(self._files, ssl.PROTOCOL_TLS_CLIENT)
        try:
            body = Path(self._files.crl).read_bytes() if self._files.crl else b""
        except FileNotFoundError:
            body = b""
        except OSError as error:
            raise InvalidRequestError(f"{self._files.crl} cannot be read: {error}") from error
        return _Loaded(server, client, self._read_crl(body))

    def _read_crl(self, body: bytes) -> RevocationList:
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric import ec, rsa

        if not body.strip():
            return RevocationList()
        try:
            crl = x509.load_pem_x509_crl(body)
            number = crl.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number
            trusted = x509.load_pem_x509_certificates(Path(self._files.ca).read_bytes())
        except (OSError, ValueError, x509.DuplicateExtension, x509.ExtensionNotFound) as error:
            raise InvalidRequestError(
                f"{self._files.crl} is no numbered list of revoked certificates (PEM): {error}: "
                "copy authority/crl.pem of the head's data directory"
            ) from error
        for authority in trusted:
            key = authority.public_key()
            if authority.subject != crl.issuer or not isinstance(
                key, ec.EllipticCurvePublicKey | rsa.RSAPublicKey
            ):
                continue
            if crl.is_signature_valid(key):
                serials = frozenset(each.serial_number for each in crl)
                return RevocationList(number, serials, body.decode())
        raise InvalidRequestError(
            f"{self._files.crl} is signed by none of the authorities in {self._files.ca}: copy "
            "authority/crl.pem of the head's data directory"
        )


def _shutdown(connection: Connection) -> Callable[[], None]:
    """A function that ends a connection and does not keep it alive."""
    if isinstance(connection, asyncio.StreamWriter):
        # Its transport forgets the socket when it is closed.
        return partial(connection.get_extra_info("socket").shutdown, socket.SHUT_RDWR)
    link = weakref.ref(connection)

    def end() -> None:
        if (found := link()) is not None:
            shut_down(found)

    return end


def _watch(watched: "weakref.ref[Credentials]") -> None:
    """End links whose certificate is revoked, as long as the credentials are in use."""
    while True:
        time.sleep(WATCH_S)
        credentials = watched()
        if credentials is None:
            return
        credentials._end_revoked()
        del credentials


def tls_context(
    files: TlsFiles, protocol: int, verify_mode: ssl.VerifyMode = ssl.CERT_REQUIRED
) -> ssl.SSLContext:
    """A context that verifies the certificate of the other end by the files' authorities, whatever
    host name it has.

    Raises:
        InvalidRequestError: a file cannot be read, or they do not belong together.
    """
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the identity is checked instead
    context.verify_mode = verify_mode
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        # A resumed session would outlive the certificate that began it.
        context.num_tickets = 0
    try:
        context.load_verify_locations(files.ca)
        context.load_cert_chain(files.certificate, files.key)
    except OSError as error:
        raise InvalidRequestError(
            f"{files.ca}, {files.certificate} and {files.key} cannot be used for TLS: {error}: "
            "give PEM files of an authority, of a certificate and of its key"
        ) from error
    return context
