"""A file that is there as a whole or not at all."""

from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Put `text` in the place of what `path` held; until that is done, and where it fails, nothing
    changes.

    Raises:
        OSError: it cannot be written.
    """
    part = path.with_name(f"{path.name}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
