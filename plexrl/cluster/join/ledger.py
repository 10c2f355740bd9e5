"""The head's record of join tokens and of the nodes that have joined: one durable file.

A change is written to a new file, synchronised to the disk and renamed, under a lock. So a token is
spent for good before its certificate leaves the head, and a crash leaves the former or the new
record. `plexrl node token` and the join service, which are two processes, change the same record.

From the record follows the list of revoked certificates, `crl.pem`, which the head's processes
follow, and which reaches the nodes by the scheduler's heartbeats.
"""

import fcntl
import hmac
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from cryptography import x509

from plexrl.cluster.join.authority import Authority
from plexrl.errors import ConflictError, JoinTokenError, NotFoundError, StorageError
from plexrl.process.folders.durable_files import write_durably
from plexrl.process.folders.operator_key import write_private

NAME = "members.json"
LOCK = "members.lock"
CRL = "crl.pem"


class Token(msgspec.Struct, kw_only=True):
    """A join token. Times are seconds since the epoch, by the head's clock."""

    digest: str
    """SHA-256 of the secret."""
    created_at: float
    expires_at: float
    uses: int
    """Nodes that it may admit in total."""
    admitted: list[tuple[str, str]] = []
    """(node, SHA-256 of its public key) of each admitted node."""
    is_revoked: bool = False

    def refusal(self, now: float) -> str:
        """Why the token admits no further node: `revoked`, `expired` or `used`; empty: it does."""
        if self.is_revoked:
            return "revoked"
        if now >= self.expires_at:
            return "expired"
        return "used" if len(self.admitted) >= self.uses else ""


class JoinedNode(msgspec.Struct, kw_only=True):
    """A node that has joined."""

    keys: list[str]
    """SHA-256 of the public keys that are accepted: of its last certificate, and of the one before,
    because the answer with the last may have been lost."""
    joined_at: float
    certified_until: float
    host: str = ""
    """Address from which the node last spoke to the head."""
    certificates: dict[str, float] = {}
    """End of each of its certificates' validity, by serial number in hexadecimal."""


class Members(msgspec.Struct, kw_only=True):
    """Content of the file."""

    tokens: list[Token] = []
    nodes: dict[str, JoinedNode] = {}
    revoked: dict[str, float] = {}
    """As `Member.certificates`: those that have been revoked and would still be valid."""

    def forget(self, node: str) -> bool:
        """End a membership and revoke its certificates; False if there is none."""
        member = self.nodes.pop(node, None)
        if member is not None:
            self.revoked = valid(self.revoked | member.certificates)
        return member is not None


class Ledger:
    """The record in a folder of the head."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        self._lock = folder / LOCK
        self.crl = folder / CRL
        """The list of revoked certificates (PEM)."""

    def read(self) -> Members:
        """The record as it is now.

        Raises:
            StorageError: the file cannot be read.
        """
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=Members)
        except FileNotFoundError:
            return Members()
        except (OSError, msgspec.MsgspecError) as error:
            raise StorageError(
                f"{self._path} cannot be read ({error}): restore it from a backup, or remove it, "
                "after which tokens are void and nodes join again",
                path=str(self._path),
            ) from error

    @contextmanager
    def change(self) -> Iterator[Members]:
        """The record, to be changed; durable at the end. Nothing is written after an exception.

        Raises:
            StorageError: the file cannot be read or written.
        """
        with self._locked():
            members = self.read()
            yield members
            self._write(msgspec.json.encode(members))

    def publish(self, authority: Authority) -> None:
        """Write the list of revoked certificates, unless the present one says the same: processes
        read a new list again. It may be repeated at any time.

        Raises:
            StorageError: a file cannot be read or written.
        """
        with self._locked():
            serials = valid(self.read().revoked)
            try:
                former = self._crl()
                if former is not None and authority.is_current(former, serials):
                    return
                # From the time, so that numbers increase even if the files are lost.
                number = max(time.time_ns(), 1 + (0 if former is None else crl_number(former)))
                write_private(self.crl, authority.revoke(serials, number).decode())
            except OSError as error:
                raise StorageError(f"{self.crl} cannot be written: {error}") from error

    def _crl(self) -> x509.CertificateRevocationList | None:
        """The present list; None: there is none that can be read."""
        try:
            found = x509.load_pem_x509_crl(self.crl.read_bytes())
            crl_number(found)
        except (FileNotFoundError, ValueError, x509.ExtensionNotFound):
            return None
        return found

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StorageError(f"{self._lock} cannot be opened: {error}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _write(self, body: bytes) -> None:
        try:
            write_durably(self._path, body, mode=0o600)
        except OSError as error:
            raise StorageError(f"{self._path} cannot be written: {error}") from error


def crl_number(crl: x509.CertificateRevocationList) -> int:
    """The number of a list. Raises `x509.ExtensionNotFound`."""
    return crl.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number


def valid(certificates: dict[str, float]) -> dict[str, float]:
    """The serial numbers of `Member.certificates` that have not expired."""
    now = time.time()
    return {serial: end for serial, end in certificates.items() if end > now}


def admit(
    members: Members, digest: str, node: str, key: str, *, now: float, is_live: bool
) -> Token:
    """Spend one use of a token on a node with this key. A repeated request of the same node with
    the same key, whose answer was lost, spends nothing as long as its membership lasts.

    Raises:
        ConflictError: a live node has the name.
        JoinTokenError: the token admits no further node.
    """
    token = next(
        (token for token in members.tokens if hmac.compare_digest(token.digest, digest)), None
    )
    if token is None:
        raise JoinTokenError(
            "the head does not know this join token: run `plexrl node token` on it for a new one",
            reason="unknown",
        )
    known = members.nodes.get(node)
    is_own = known is not None and key in known.keys
    is_repeated = is_own and (node, key) in token.admitted
    reason = token.refusal(now)
    if reason and not (reason == "used" and is_repeated):
        raise JoinTokenError(
            f"this join token is {reason}: run `plexrl node token` on the head for a new one",
            reason=reason,
        )
    if is_live and not is_own:
        raise ConflictError(
            f"a live node is named {node!r}: choose another name with --name, or end that node "
            "with `plexrl node leave` on its machine first",
            node=node,
        )
    if not is_repeated:
        token.admitted.append((node, key))
    return token


def revoke(ledger: Ledger, authority: Authority, node: str) -> int:
    """End a node's membership, and revoke its certificates; returns their number. It is durable
    when this returns, and open links end within seconds.

    Raises:
        NotFoundError: no node of this name has joined.
        StorageError: the record cannot be read or written.
    """
    with ledger.change() as members:
        count = len(valid(members.nodes[node].certificates)) if node in members.nodes else 0
        if not members.forget(node):
            raise NotFoundError(
                f"no node {node!r} has joined this head: `plexrl node tokens` lists those that have"
            )
    ledger.publish(authority)
    return count
