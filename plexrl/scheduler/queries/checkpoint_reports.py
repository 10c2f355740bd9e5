"""Merges the nodes' reports on a job's checkpoints into one list."""

from collections.abc import Iterable, Mapping
from typing import Any

Plain = dict[str, Any]


def merged(reports: Iterable[Mapping[str, Any]]) -> list[Plain]:
    """The newest report on each checkpoint, sorted by name.

    The writing node reports progress; the other nodes report the files on the shared disk.
    """
    newest: dict[str, Mapping[str, Any]] = {}
    for report in reports:
        name = str(report["name"])
        if name not in newest or report["as_of"] > newest[name]["as_of"]:
            newest[name] = report
    return [dict(newest[name]) for name in sorted(newest)]
