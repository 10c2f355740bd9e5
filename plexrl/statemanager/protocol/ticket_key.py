"""File with a node's ticket key."""

import os
import secrets
import stat
from pathlib import Path

from plexrl.errors import PermissionDeniedError, UnavailableError
from plexrl.process.folders.durable_files import create_durably, flush, make_folders_durably
from plexrl.statemanager.protocol.tickets import KEY_BYTES, TicketKey

KEY_FILE = "ticket.key"
"""Name in the NVMe tier's directory, unless the configuration sets another path."""


def read_ticket_key(path: Path) -> TicketKey:
    """The key in a file.

    Raises:
        PermissionDeniedError: other users can read it.
        UnavailableError: it cannot be read; the StateManager creates it at its first start.
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
                f"{path} has mode {mode:04o}, so other users can mint tickets: remove it, and the "
                "StateManager creates a new one"
            )
        return TicketKey(file.read())


def make_ticket_key(path: Path) -> TicketKey:
    """The key in a file, which is created if absent. With several creators, the first one wins."""
    if not path.exists():
        make_folders_durably(path.parent, mode=0o700)
        own = path.with_name(f".{path.name}.{os.getpid()}")
        own.unlink(missing_ok=True)
        create_durably(own, secrets.token_bytes(KEY_BYTES))
        try:
            os.link(own, path)
        except FileExistsError:
            # Another daemon that shares the key created it first.
            pass
        finally:
            own.unlink()
        flush(path.parent)
    return read_ticket_key(path)
