"""The operator's API key, in a private file of the data directory."""

import os
import secrets
from pathlib import Path

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
    """Replace a file atomically by one that only its owner may read."""
    part = stage_private(path, text)
    part.rename(path)


def stage_private(path: Path, text: str) -> Path:
    """Write `text` to a private file that the caller renames to `path`."""
    part = path.with_suffix(".part")
    part.unlink(missing_ok=True)
    part.touch(mode=0o600, exist_ok=False)
    with part.open("w") as file:
        file.write(text)
        file.flush()
        # Else a power cut may leave an empty or damaged file under the final name.
        os.fsync(file.fileno())
    return part
