"""HTTPS for the router's API, under the same limits as HTTP.

A connection counts from its first byte, not from the end of its TLS handshake, and the handshake
has the deadline of a request's head. So clients that never finish a handshake cannot hold more
connections than others.
"""

import asyncio
import math
import ssl
from asyncio.sslproto import SSLProtocol
from typing import Any, cast

from plexrl.errors import InvalidRequestError
from plexrl.router.server.config import HttpsFiles
from plexrl.router.server.connections import Connections
from plexrl.router.server.guarded_protocol import GuardedProtocol
from plexrl.wire.links.followed_files import FollowedFiles


def server_certificate(files: HttpsFiles) -> FollowedFiles[ssl.SSLContext]:
    """The API's certificate. Each handshake uses the newest files.

    Raises:
        InvalidRequestError: the files cannot be used.
    """

    def load() -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        try:
            context.load_cert_chain(files.certificate, files.key)
        except OSError as error:
            raise InvalidRequestError(
                f"https: {files.certificate} and {files.key} cannot be used: {error}: give PEM "
                "files of a certificate and of its key"
            ) from error
        return context

    return FollowedFiles((files.certificate, files.key), load)


class GuardedTls(SSLProtocol):
    """The TLS layer of one connection, which counts as a connection until the handshake ends."""

    def __init__(
        self, connections: Connections, timeout_s: float, context: ssl.SSLContext, app: Any
    ) -> None:
        super().__init__(
            asyncio.get_running_loop(),
            app,
            context,
            None,  # type: ignore[arg-type]  # nothing waits for the handshake
            server_side=True,
            ssl_handshake_timeout=math.ceil(timeout_s),
            ssl_shutdown_timeout=math.ceil(timeout_s),
        )
        self._connections = connections
        self._raw: asyncio.BaseTransport | None = None
        self._has_begun = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Register the connection; close it if it is over the limit."""
        assert isinstance(transport, asyncio.Transport)
        self._raw = transport
        peer = transport.get_extra_info("peername")
        if self._connections.admit(self, peer[0] if peer else ""):
            self._has_begun = True
            super().connection_made(transport)
        else:
            transport.abort()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Unregister a connection whose handshake failed."""
        self._connections.lost(self)
        if self._has_begun:
            super().connection_lost(exc)

    def handshake_ended(self) -> None:
        """The HTTP connection registers itself instead."""
        self._connections.lost(self)

    def drop(self) -> None:
        """Close the connection at once."""
        assert isinstance(self._raw, asyncio.Transport), "it was admitted"
        self._raw.abort()


def guarded_https(
    connections: Connections, header_timeout_s: float, certificate: FollowedFiles[ssl.SSLContext]
) -> type[asyncio.Protocol]:
    """The class of uvicorn's connections."""

    def make(**arguments: Any) -> GuardedTls:
        app = GuardedProtocol(connections, header_timeout_s, **arguments)
        tls = GuardedTls(connections, header_timeout_s, certificate.newest(), app)
        app.on_made = tls.handshake_ended
        return tls

    # uvicorn calls it like a class, and TLS layers are protocols of the same methods.
    return cast("type[asyncio.Protocol]", make)
