"""Writes a text file atomically."""

from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Replace the contents of `path` atomically; after an error the old contents remain.

    Raises:
        OSError: the file cannot be written.
    """
    part = path.with_name(f"{path.name}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
