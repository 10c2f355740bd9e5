"""Merges the nodes' reports on a job's checkpoints into one list."""

from collections.abc import Iterable

from plexrl.wire.messages.node_queries import CheckpointView


def merged(reports: Iterable[CheckpointView]) -> list[CheckpointView]:
    """The newest report on each checkpoint, sorted by name.

    The writing node reports progress; the other nodes report the files on the shared disk.
    """
    newest: dict[str, CheckpointView] = {}
    for report in reports:
        name = report["name"]
        if name not in newest or report["as_of"] > newest[name]["as_of"]:
            newest[name] = report
    return [newest[name] for name in sorted(newest)]
