"""Options that `plexrl fidelity` and `plexrl forecast` share."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from plexrl.traces.convert.history import History

Policy = Annotated[
    str | None,
    typer.Option(help="Simulated policy; default: policy and settings that the recording holds."),
]
WarmUp = Annotated[
    int, typer.Option(min=0, help="First cycles of each job that are not compared or counted.")
]
WARM_UP_CYCLES = 3
Seeds = Annotated[int, typer.Option(min=1, help="Runs with cycles drawn anew.")]
SEEDS = 5


def histories(recordings: Sequence[Path]) -> "list[History]":
    """The recordings.

    Raises:
        InvalidRequestError: a file cannot be read or is no recording.
    """
    from plexrl.traces.convert.history import read_history

    return [read_history(recording) for recording in recordings]
