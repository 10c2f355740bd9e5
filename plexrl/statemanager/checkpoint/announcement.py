"""A load waits for a checkpoint that a node has announced, until that node is lost.

The node renews its announcements while it lives. A reader counts the time without a renewal by its
own pauses, so neither clocks nor a store that answers nobody let a node seem lost. A reader that
loads what is complete ends the announcement first: a node that comes back then fails the save,
so the save fails or the load waits for it, except if the node comes back and publishes at the
moment at which the announcement ends.
"""

import logging
import threading
import time

from plexrl.errors import CheckpointNotFoundError, DeadlineExceededError
from plexrl.statemanager.checkpoint.places.place import CheckpointPlace

LOG = logging.getLogger(__name__)

RENEW_S = 3.0
"""Period of the renewals."""
LOST_S = 60.0
"""A node without a renewal for this time is lost."""
WAIT_S_MAX = 600.0
"""Longest wait for a node that lives."""
POLL_S = 0.02
POLL_S_MAX = 1.0


def wait_until_written(place: CheckpointPlace, *, lost_s: float = LOST_S) -> None:
    """Wait while a node that lives writes the checkpoint, or will write it.

    If all nodes that announced it are lost, a complete checkpoint of that name stays valid.

    Raises:
        CheckpointNotFoundError: they are lost, and there is none.
        DeadlineExceededError: it takes too long.
        StoreUnavailableError: the object store does not answer.
    """
    pause = threading.Event()
    deadline = time.monotonic() + WAIT_S_MAX
    pause_s = POLL_S
    silent: dict[str, tuple[str, float]] = {}
    """The last renewal of each node, and the seconds since then."""
    while announced := place.announced():
        for node, renewal in announced.items():
            before, seconds = silent.get(node, ("", 0.0))
            silent[node] = (renewal, seconds + pause_s if renewal == before else 0.0)
        if all(silent[node][1] >= lost_s for node in announced):
            _end(place, sorted(announced), lost_s)
            return
        if time.monotonic() > deadline:
            raise DeadlineExceededError(
                f"checkpoint {place.name!r} is still being written by node "
                f"{' and '.join(sorted(announced))} after {WAIT_S_MAX:g} s: load it later"
            )
        # A request to an object store costs more than a look at a directory.
        pause_s = min(POLL_S_MAX, 1.5 * pause_s)
        pause.wait(pause_s)


def lost_to_a_load(place: CheckpointPlace, node: str) -> CheckpointNotFoundError:
    """The error of a save whose announcement a load has ended."""
    return CheckpointNotFoundError(
        f"node {node!r} did not renew its announcement of checkpoint {place.name!r} in time, and a "
        "load took the earlier one of that name: save it again, with overwrite"
    )


def _end(place: CheckpointPlace, nodes: list[str], lost_s: float) -> None:
    lost = " and ".join(repr(node) for node in nodes)
    if not place.exists():
        raise CheckpointNotFoundError(
            f"checkpoint {place.name!r} does not exist: node {lost} was writing it and has given "
            f"no sign of life for {lost_s:g} s. Save it again, or load another checkpoint; if the "
            "node runs, look at its StateManager and load it later"
        )
    LOG.warning(
        "node %s was writing %s and has given no sign of life for %g s: the complete checkpoint of "
        "that name is loaded",
        *(lost, place, lost_s),
    )
    for node in nodes:
        place.announce_end(node)
