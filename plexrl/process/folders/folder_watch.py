"""Watches folders that a process needs: they may disappear, and a network file system may stall."""

import asyncio
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

FOLDER_MISSING = "folder_missing"
FOLDER_STALLED = "folder_stalled"
ANSWER_S = 5.0
"""Time in which the file system of a folder has to answer."""

Finding = tuple[str, str]
"""Code and message of a condition; neither changes while the condition lasts."""


class FolderWatch:
    """Looks at folders without waiting long for any."""

    def __init__(self, where: str, folders: Sequence[Path]) -> None:
        """`where`: the machine or node of the folders, for messages."""
        self._where = where
        self._folders = folders
        self._looking: asyncio.Future[list[Path]] | None = None

    async def look(self) -> list[Finding]:
        """A condition for each missing folder, or one if a file system does not answer. Takes
        `ANSWER_S` at most."""
        if self._looking is None:
            self._looking = asyncio.ensure_future(asyncio.to_thread(self._missing))
        # Not cancelled: a thread that waits for a file system cannot be ended.
        done, _ = await asyncio.wait({self._looking}, timeout=ANSWER_S)
        if not done:
            names = ", ".join(map(str, self._folders))
            text = f"a folder of {self._where} does not answer, one of {names}"
            return [(FOLDER_STALLED, f"{text}: see to its file system")]
        missing, self._looking = self._looking.result(), None
        return [
            (FOLDER_MISSING, f"the folder {path} of {self._where} is missing") for path in missing
        ]

    def _missing(self) -> list[Path]:
        missing = [folder for folder in self._folders if not folder.is_dir()]
        for folder in self._folders:
            # A file system may answer reads from its caches and stall whoever writes. One that
            # refuses the write is not stalled; what it refuses to others they report.
            with suppress(OSError):
                os.utime(folder)
        return missing
