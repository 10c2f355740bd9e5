"""Both ends of a TCP connection prove that they know the cluster's secret, and do not say it.

    server → client: nonce        client → server: nonce, HMAC-SHA256(secret, both nonces, "client")
    server → client: HMAC-SHA256(secret, both nonces, "server")

What follows is neither encrypted nor signed: the network is the cluster's own.
"""

import hashlib
import hmac
import secrets
import socket

from plexrl.errors import AuthenticationError, ConnectionLostError

NONCE_BYTES = 32
_MAC_BYTES = hashlib.sha256().digest_size


def greet_server(connection: socket.socket, secret: bytes) -> None:
    """The client's part.

    Raises:
        AuthenticationError: the server does not know the secret.
        ConnectionLostError: the server closed; it does so to whoever does not know the secret.
    """
    theirs = _exactly(connection, NONCE_BYTES)
    ours = secrets.token_bytes(NONCE_BYTES)
    connection.sendall(ours + _mac(secret, theirs + ours, b"client"))
    if not hmac.compare_digest(
        _exactly(connection, _MAC_BYTES), _mac(secret, theirs + ours, b"server")
    ):
        raise AuthenticationError("the remote StateManager does not know the cluster's secret")


def greet_client(connection: socket.socket, secret: bytes) -> None:
    """The server's part.

    Raises:
        AuthenticationError: the client does not know the secret.
        ConnectionLostError: the client closed.
    """
    ours = secrets.token_bytes(NONCE_BYTES)
    connection.sendall(ours)
    answer = _exactly(connection, NONCE_BYTES + _MAC_BYTES)
    both = ours + answer[:NONCE_BYTES]
    if not hmac.compare_digest(answer[NONCE_BYTES:], _mac(secret, both, b"client")):
        raise AuthenticationError("a client does not know the cluster's secret")
    connection.sendall(_mac(secret, both, b"server"))


def _mac(secret: bytes, nonces: bytes, end: bytes) -> bytes:
    return hmac.digest(secret, nonces + end, "sha256")


def _exactly(connection: socket.socket, nbytes: int) -> bytes:
    received = b""
    while len(received) < nbytes:
        part = connection.recv(nbytes - len(received))
        if not part:
            raise ConnectionLostError(
                "the other end closed during the handshake: give both the cluster's secret"
            )
        received += part
    return received
