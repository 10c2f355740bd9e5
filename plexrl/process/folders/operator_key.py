"""The operator's API key, in a private file of the data directory."""

import secrets
from pathlib import Path

from plexrl.process.folders.durable_files import stage_durably, write_durably

NAME = "operator.key"


def new_api_key() -> str:
    """A new random key."""
    return f"plx-{secrets.token_urlsafe(24)}"


def operator_key(data_dir: Path) -> str:
    """The operator's key; created at the first start."""
    path = data_dir / NAME
    if path.exists():
        return path.read_text().strip()
    key = new_api_key()
    write_private(path, key)
    return key


def write_private(path: Path, text: str) -> None:
    """Replace a file atomically and durably by one that only its owner may read. Raises
    `OSError`."""
    write_durably(path, text.encode(), mode=0o600)


def stage_private(path: Path, text: str) -> Path:
    """Write `text` to a private file, for `rename_durably` to `path`. Raises `OSError`."""
    return stage_durably(path, text.encode(), mode=0o600)
