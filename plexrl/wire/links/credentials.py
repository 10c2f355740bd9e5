"""Certificates of a process: who it is, and whom it trusts.

Every process of a networked cluster has a certificate of the cluster's authority. The certificate
names the process by a URI, `plexrl://ROLE/NAME`, in its subjectAltName; nothing that a process says
about itself counts. Files are read again when they change, so certificates and the authority can be
replaced while processes run: new connections use the new files, open ones go on.
"""

import logging
import ssl
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote, urlsplit

from plexrl.errors import AuthenticationError, InvalidRequestError

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

LOG = logging.getLogger(__name__)

SCHEME = "plexrl"
_Stamp = tuple[tuple[int, int, int], ...]


class Role(StrEnum):
    """What a process is in the cluster."""

    SCHEDULER = "scheduler"
    ROUTER = "router"
    NODE = "node"
    """A node's agent, StateManager and workers."""
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


class Credentials:
    """TLS contexts of a process. Thread-safe."""

    def __init__(self, files: TlsFiles) -> None:
        """Raises:
        InvalidRequestError: a file cannot be read, or they do not belong together.
        """
        self._files = files
        self._lock = threading.Lock()
        self._stamp = _stamp(files)
        self._server = _context(files, ssl.PROTOCOL_TLS_SERVER)
        self._client = _context(files, ssl.PROTOCOL_TLS_CLIENT)
        self._server.sni_callback = self._use_newest

    @property
    def identity(self) -> Identity:
        """The identity in this process's own certificate."""
        from cryptography import x509

        names = self._own().extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
        return identity_of({"subjectAltName": [("URI", uri) for uri in uris]})

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
        self._refresh()
        return self._server

    def client_context(self) -> ssl.SSLContext:
        """A context that demands a certificate of the authority, whatever host name it has."""
        self._refresh()
        return self._client

    def _use_newest(
        self, connection: ssl.SSLObject, server_name: str | None, context: ssl.SSLContext
    ) -> None:
        del server_name, context
        connection.context = self.server_context()

    def _refresh(self) -> None:
        with self._lock:
            try:
                stamp = _stamp(self._files)
                if stamp == self._stamp:
                    return
                server = _context(self._files, ssl.PROTOCOL_TLS_SERVER)
                client = _context(self._files, ssl.PROTOCOL_TLS_CLIENT)
            except InvalidRequestError as error:
                # The files may be in the middle of being replaced.
                LOG.warning("the former certificate is used for now: %s", error)
                return
            server.sni_callback = self._use_newest
            self._stamp, self._server, self._client = stamp, server, client
            LOG.info("%s is used from now on", self._files.certificate)


def _stamp(files: TlsFiles) -> _Stamp:
    try:
        found = [Path(path).stat() for path in (files.ca, files.certificate, files.key)]
    except OSError as error:
        raise InvalidRequestError(f"a TLS file cannot be read: {error}") from error
    return tuple((one.st_mtime_ns, one.st_ino, one.st_size) for one in found)


def _context(files: TlsFiles, protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the identity is checked instead
    context.verify_mode = ssl.CERT_REQUIRED
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
