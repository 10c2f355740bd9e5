"""Runs a step on all ranks, such that it succeeds on all of them or raises on all of them."""

import json
from collections.abc import Callable

from plexrl.errors import PlexRLError, from_wire
from plexrl.statemanager.store.disk_space import held_error


def on_all_ranks(gather: Callable[[str], list[str]], attempt: Callable[[], str]) -> list[str]:
    """The result of `attempt` on every rank, in rank order, if it succeeds on all of them.

    Raises:
        PlexRLError: the error of the first rank that failed; on every rank.
    """
    own: dict[str, object]
    try:
        own = {"value": attempt()}
    except PlexRLError as error:
        own = {"error": error.to_wire()}
    except OSError as error:
        held = held_error(error, "a rank cannot write its file")
        if held is None:
            raise
        own = {"error": held.to_wire()}
    found = [json.loads(text) for text in gather(json.dumps(own))]
    for answer in found:
        if "error" in answer:
            raise from_wire(answer["error"])
    return [answer["value"] for answer in found]
