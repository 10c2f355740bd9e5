"""What several nodes say of a job's checkpoints, as one list."""

from collections.abc import Iterable, Mapping
from typing import Any

Plain = dict[str, Any]


def merged(reports: Iterable[Mapping[str, Any]]) -> list[Plain]:
    """The newest word on each checkpoint, by name.

    The node that writes one knows how far it is; the others know what lies on the disk they share.
    """
    newest: dict[str, Mapping[str, Any]] = {}
    for report in reports:
        name = str(report["name"])
        if name not in newest or report["as_of"] > newest[name]["as_of"]:
            newest[name] = report
    return [dict(newest[name]) for name in sorted(newest)]
