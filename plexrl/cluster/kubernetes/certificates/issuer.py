"""The issuer: gives each pod the certificate of its own role and name.

A pod sends its ServiceAccount token and a signing request over HTTPS. The API server says whose
token it is (TokenReview): the ServiceAccount decides the role, and the pod or node that the token
is bound to decides the name. Nothing that the pod says of itself counts, and its private key never
leaves it.
"""

import json
import logging
import ssl
import sys
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plexrl.cluster.join.authority import Authority
from plexrl.cluster.kubernetes.api import TIMEOUT_S
from plexrl.errors import (
    AuthenticationError,
    InvalidRequestError,
    PermissionDeniedError,
    PlexRLError,
    UnavailableError,
)
from plexrl.wire.links.credentials import Identity, Role
from plexrl.wire.links.handshakes import Handshakes
from plexrl.wire.links.tls_socket import shut_down

if TYPE_CHECKING:
    from kubernetes.client import ApiClient

LOG = logging.getLogger(__name__)

AUDIENCE = "plexrl-issuer"
"""Audience of the tokens: a token for the API server is refused, and one for the issuer opens
nothing else."""
PATH = "/v1/certificate"
BODY_BYTES_MAX = 64 << 10
READ_TIMEOUT_S = 10.0
CONNECTIONS_MAX = 256
_POD = "authentication.kubernetes.io/pod-name"
_NODE = "authentication.kubernetes.io/node-name"
_ACCOUNT = "system:serviceaccount:"
_STATUS = {
    AuthenticationError: HTTPStatus.UNAUTHORIZED,
    PermissionDeniedError: HTTPStatus.FORBIDDEN,
    InvalidRequestError: HTTPStatus.BAD_REQUEST,
    UnavailableError: HTTPStatus.SERVICE_UNAVAILABLE,
}


@dataclass(frozen=True, slots=True)
class Issuer:
    """Decides and signs."""

    api: "ApiClient"
    authority: Authority
    roles: Mapping[str, Role]
    """Role of each ServiceAccount, as `NAMESPACE/NAME`."""
    life: timedelta = field(default=timedelta(hours=24))

    def identity(self, token: str) -> Identity:
        """The identity that a token proves.

        Raises:
            AuthenticationError: it is no valid token for the issuer.
            PermissionDeniedError: it is of no part of this cluster.
            UnavailableError: the API server does not answer.
        """
        user = self._review(token)
        account = user.username.removeprefix(_ACCOUNT).replace(":", "/")
        role = self.roles.get(account) if user.username.startswith(_ACCOUNT) else None
        if role is None:
            raise PermissionDeniedError(
                f"{user.username} is no part of this cluster: use the chart's ServiceAccounts"
            )
        extra = user.extra or {}
        if role == Role.SCHEDULER:
            return Identity(role)
        key = _NODE if role == Role.NODE else _POD
        names = extra.get(key) or []
        if len(names) != 1:
            raise PermissionDeniedError(
                f"the token of {user.username} is bound to no {key.rpartition('/')[2]}: mount the "
                "token by a projected volume in a pod"
            )
        return Identity(role, names[0])

    def _review(self, token: str) -> Any:
        from kubernetes.client import (
            ApiException,
            AuthenticationV1Api,
            V1TokenReview,
            V1TokenReviewSpec,
        )
        from urllib3.exceptions import HTTPError

        review = V1TokenReview(spec=V1TokenReviewSpec(token=token, audiences=[AUDIENCE]))
        try:
            status = (
                AuthenticationV1Api(self.api)
                .create_token_review(review, _request_timeout=TIMEOUT_S)
                .status
            )
        except (ApiException, HTTPError) as error:
            raise UnavailableError(f"the API server did not review the token: {error}") from error
        if not status.authenticated or AUDIENCE not in (status.audiences or ()):
            raise AuthenticationError(
                f"the token is not valid for the audience {AUDIENCE}: mount a projected token"
            )
        return status.user

    def sign(self, token: str, request: str, address: str) -> dict[str, str]:
        """The certificate for a signing request from `address`, and the authority's.

        Raises as `identity`, and InvalidRequestError for a malformed request.
        """
        identity = self.identity(token)
        certificate = self.authority.sign(request.encode(), identity, [address], self.life)
        LOG.info("issued a certificate to %s at %s", identity, address)
        return {"certificate": certificate.decode(), "ca": self.authority.pem.decode()}


class IssuerServer:
    """Serves an issuer over HTTPS, with a certificate of its own authority."""

    def __init__(self, issuer: Issuer, host: str, port: int, names: list[str]) -> None:
        """`names` are those at which clients reach it."""
        self._issuer, self._names = issuer, names
        handler = type("Handler", (_Handler,), {"issuer": issuer})
        self._server = _Server((host, port), handler)
        self._server.socket = self._context().wrap_socket(
            self._server.socket, server_side=True, do_handshake_on_connect=False
        )
        self.port = int(self._server.server_address[1])

    def _context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        with tempfile.TemporaryDirectory() as folder:
            # As long-lived as a restart of the issuer is rare; clients trust the authority.
            files = self._issuer.authority.issue(
                Path(folder), Identity(Role.HEAD), self._names, timedelta(days=365)
            )
            context.load_cert_chain(files.certificate, files.key)
        return context

    def serve(self) -> None:
        """Serve until `close`."""
        self._server.serve_forever(poll_interval=0.2)

    def start(self) -> None:
        """Serve in a thread."""
        threading.Thread(target=self.serve, name="issuer", daemon=True).start()

    def close(self) -> None:
        """Stop."""
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    """A thread for each connection, within a bound that a flood cannot use up."""

    daemon_threads = True
    request_queue_size = CONNECTIONS_MAX

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._open = Handshakes(CONNECTIONS_MAX)
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection on a thread of its own."""
        self._open.begin(request, client_address[0], partial(shut_down, request))
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """A connection has ended."""
        self._open.ended(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log what ended a connection, such as a handshake that failed."""
        del request
        LOG.info("a connection from %s ended: %s", client_address[0], sys.exc_info()[1])


class _Handler(BaseHTTPRequestHandler):
    issuer: Issuer
    timeout = READ_TIMEOUT_S
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Health."""
        self._answer(
            HTTPStatus.OK if self.path == "/healthz" else HTTPStatus.NOT_FOUND, {"ok": True}
        )

    def do_POST(self) -> None:
        """A certificate."""
        try:
            self._answer(HTTPStatus.OK, self._certificate())
        except PlexRLError as error:
            LOG.warning("refused %s: %s", self.client_address[0], error)
            status = _STATUS.get(type(error), HTTPStatus.INTERNAL_SERVER_ERROR)
            self._answer(status, {"error": error.message})

    def _certificate(self) -> dict[str, str]:
        kind, _, token = self.headers.get("Authorization", "").partition(" ")
        length = self.headers.get("Content-Length", "")
        if self.path != PATH or not length.isdigit() or int(length) > BODY_BYTES_MAX:
            self.close_connection = True
            raise InvalidRequestError(f"send JSON of at most {BODY_BYTES_MAX} bytes to {PATH}")
        body = self.rfile.read(int(length))
        if kind != "Bearer" or not token:
            raise AuthenticationError("send the pod's token as `Authorization: Bearer TOKEN`")
        try:
            request = json.loads(body)["request"]
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidRequestError('send {"request": PEM of a signing request}') from error
        if not isinstance(request, str):
            raise InvalidRequestError("the signing request must be PEM text")
        return self.issuer.sign(token, request, self.client_address[0])

    def _answer(self, status: HTTPStatus, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are logged where they are decided."""
