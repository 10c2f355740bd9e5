"""Handshake of tickets: the client sends its claims, and both ends prove they know the signature.

    server → client: nonce
    client → server: u16 length, claims, nonce, HMAC-SHA256(signature, both nonces, "client")
    server → client: HMAC-SHA256(signature, both nonces, "server")

The server computes the signature from the claims with the cluster's key. So a ticket is never on
the wire, and an eavesdropper cannot use it. Over plain TCP later traffic is neither encrypted nor
signed, so that is for networks that are declared trusted.
"""

import hashlib
import hmac
import secrets
import struct
import time

from plexrl.errors import AuthenticationError, ConnectionLostError
from plexrl.statemanager.protocol.tickets import Claims, TicketKey, split
from plexrl.wire.links.dial import BlockingSocket

NONCE_BYTES = 32
PART_S = 5.0
"""Timeout for each part of the handshake."""
_MAC_BYTES = hashlib.sha256().digest_size
_LENGTH = struct.Struct("<H")


def greet_server(connection: BlockingSocket, ticket: bytes) -> None:
    """The client's side.

    Raises:
        AuthenticationError: the server has another key than the ticket's.
        ConnectionLostError: the server closed, as it does if the ticket is not of its key.
    """
    signature, claims = split(ticket)
    theirs = _exactly(connection, NONCE_BYTES)
    ours = secrets.token_bytes(NONCE_BYTES)
    proof = _mac(signature, theirs + ours, b"client")
    connection.sendall(_LENGTH.pack(len(claims)) + claims + ours + proof)
    expected = _mac(signature, theirs + ours, b"server")
    if not hmac.compare_digest(_exactly(connection, _MAC_BYTES), expected):
        raise AuthenticationError(
            "the remote StateManager has another ticket key: give all nodes the same key file"
        )


def greet_client(connection: BlockingSocket, key: TicketKey) -> Claims:
    """The server's side; returns the client's claims.

    Raises:
        AuthenticationError: the client's ticket is not of this key.
        ConnectionLostError: the client closed.
    """
    ours = secrets.token_bytes(NONCE_BYTES)
    connection.sendall(ours)
    claims = _exactly(connection, *_LENGTH.unpack(_exactly(connection, _LENGTH.size)))
    answer = _exactly(connection, NONCE_BYTES + _MAC_BYTES)
    both = ours + answer[:NONCE_BYTES]
    signature = key.sign(claims)
    if not hmac.compare_digest(answer[NONCE_BYTES:], _mac(signature, both, b"client")):
        raise AuthenticationError("a client's ticket is not of this cluster's key")
    connection.sendall(_mac(signature, both, b"server"))
    return key.claims_of(claims)


def _mac(signature: bytes, nonces: bytes, end: bytes) -> bytes:
    return hmac.digest(signature, nonces + end, "sha256")


def _exactly(connection: BlockingSocket, nbytes: int) -> bytes:
    received = b""
    deadline = time.monotonic() + PART_S
    while len(received) < nbytes:
        if time.monotonic() > deadline:
            raise ConnectionLostError("the peer exceeded the handshake timeout")
        part = connection.recv(nbytes - len(received))
        if not part:
            raise ConnectionLostError(
                "the peer closed during the handshake: give both nodes the same ticket key"
            )
        received += part
    return received
