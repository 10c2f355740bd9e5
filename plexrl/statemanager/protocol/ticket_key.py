"""The file that holds a node's ticket key."""

import os
import secrets
import stat
from pathlib import Path

from plexrl.errors import PermissionDeniedError, UnavailableError
from plexrl.statemanager.protocol.tickets import KEY_BYTES, TicketKey

KEY_FILE = "ticket.key"
"""In the NVMe tier's directory, unless the configuration says otherwise."""


def read_ticket_key(path: Path) -> TicketKey:
    """The key in a file.

    Raises:
        PermissionDeniedError: others can read it too.
        UnavailableError: it cannot be read; the StateManager makes it at its first start.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise UnavailableError(
            f"the ticket key cannot be read ({error}): start the node's StateManager first, as the "
            "same user"
        ) from error
    with file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        if mode & 0o077:
            raise PermissionDeniedError(
                f"{path} has mode {mode:04o}, so others can mint tickets: remove it, and a new one "
                "is made"
            )
        return TicketKey(file.read())


def make_ticket_key(path: Path) -> TicketKey:
    """The key in a file, which is made where there is none; of several makers one wins."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        own = path.with_name(f".{path.name}.{os.getpid()}")
        with open(own, "wb", opener=_private) as file:
            file.write(secrets.token_bytes(KEY_BYTES))
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(own, path)
        except FileExistsError:
            # Another daemon that shares it was faster.
            pass
        finally:
            own.unlink()
    return read_ticket_key(path)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CREAT | os.O_TRUNC, 0o600)
