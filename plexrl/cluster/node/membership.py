"""The files that a node keeps of its membership, so that it comes back without a token.

node.json       name, head, addresses of the cluster
certificates/   key and certificate (`certificate_files.py`)
ticket.key      key of the StateManagers' tickets
"""

import base64
from pathlib import Path

import msgspec

from plexrl.cluster.join.certificate_files import CertificateFiles
from plexrl.cluster.join.messages import Membership
from plexrl.errors import StorageError
from plexrl.process.folders.durable_files import write_durably
from plexrl.process.folders.operator_key import write_private

NAME = "node.json"
TICKET_KEY = "ticket.key"
CERTIFICATES = "certificates"


class Kept(msgspec.Struct, kw_only=True):
    """Content of `node.json`."""

    node: str
    head: str
    """Address of the head's join service."""
    host: str
    """Address at which other machines reach this node."""
    schedulers: list[str]
    routers: list[str]
    data_url: str = ""
    checkpoint_url: str = ""
    pid: int = 0
    """Process of the node's supervisor, if it runs."""


class NodeFolder:
    """The membership in a node's data directory."""

    def __init__(self, data_dir: Path) -> None:
        self._data = data_dir
        self.certificates = CertificateFiles(data_dir / CERTIFICATES)

    def read(self) -> Kept | None:
        """The membership; None if this machine has not joined.

        Raises:
            StorageError: the file is damaged.
        """
        if not self.certificates.exist:
            return None
        path = self._data / NAME
        try:
            return msgspec.json.decode(path.read_bytes(), type=Kept)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError) as error:
            raise StorageError(
                f"{path} cannot be read ({error}): remove it, and join again with a token",
                path=str(path),
            ) from error

    def write(self, kept: Kept) -> None:
        """Store the membership."""
        write_private(self._data / NAME, msgspec.json.encode(kept).decode())

    def take(self, told: Membership, kept: Kept) -> Kept:
        """Store what the head has told, and a new certificate if there is one.

        Raises:
            StorageError: the data directory cannot be written.
        """
        new = msgspec.structs.replace(
            kept,
            schedulers=told.schedulers,
            routers=told.routers,
            data_url=told.data_url,
            checkpoint_url=told.checkpoint_url,
        )
        try:
            _write_key(self._data / TICKET_KEY, base64.b64decode(told.ticket_key))
            self.write(new)
        except (OSError, ValueError) as error:
            raise StorageError(f"{self._data} cannot be written: {error}") from error
        # The certificate last: it says that this machine has joined.
        if told.certificate:
            self.certificates.install(told.certificate, told.ca)
        return new

    def forget(self) -> None:
        """Remove the membership, so that only a token lets this machine join again."""
        self.certificates.remove()
        for name in (NAME, TICKET_KEY):
            (self._data / name).unlink(missing_ok=True)


def _write_key(path: Path, key: bytes) -> None:
    if path.exists() and path.read_bytes() == key:
        return
    write_durably(path, key, mode=0o600)
