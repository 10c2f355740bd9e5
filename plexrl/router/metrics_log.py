"""Metrics that controllers report: one JSON line a row, one file a job."""

import json
import math
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

from plexrl.errors import NonFiniteInputError, StorageError
from plexrl.private_folder import make_private_folder

Row = dict[str, Any]


class MetricsLog:
    """Files under one directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        make_private_folder(directory)

    def append(self, job: str, step: int, values: dict[str, float]) -> None:
        """Add a row.

        Raises:
            NonFiniteInputError: JSON has no such numbers.
            StorageError: the file cannot be written.
        """
        wrong = sorted(name for name, value in values.items() if not math.isfinite(value))
        if wrong:
            raise NonFiniteInputError(f"metrics {', '.join(wrong)} are not finite: leave them out")
        line = json.dumps({"step": step, "time": time.time(), "values": values})
        try:
            with self._path(job).open("a") as file:
                file.write(line + "\n")
        except OSError as error:
            raise StorageError(f"the metrics of {job!r} cannot be written: {error}") from error

    def read(self, job: str, after: int) -> list[Row]:
        """Rows behind number `after`, counted from 1, each with its `index`."""
        path = self._path(job)
        if not path.exists():
            return []
        rows: list[Row] = []
        for index, line in enumerate(path.read_text().splitlines(), start=1):
            if index > after:
                rows.append({"index": index, **json.loads(line)})
        return rows

    def _path(self, job: str) -> Path:
        return self._directory / f"{quote(job, safe='')}.jsonl"
