"""Assigns each run name one colour, dash and marker for all plots. Pure.

The colours follow Okabe and Ito for colour-blind readers, without those that are invisible on white
or black; dashes and markers add further distinction.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from plexrl.sim.results.comparison import ISOLATED, LabelledRun

JOB_COLOURS = (
    *("#4590de", "#e69f00", "#3d9a50", "#cf6aab", "#7cc8f2", "#d55e00", "#a983d6", "#a8a13a"),
)
SWITCH_COLOUR = "#10161d"
FIXED = {
    ISOLATED: ("#858c94", (6.0, 2.0)),
    "pack": ("#d9822b", (7.0, 1.5, 1.5, 1.5)),
    "spread": ("#3d9a50", (4.0, 1.5)),
    "spread+backfill": ("#2a6fbb", ()),
}
"""Styles of the paper's policies, equal in every report; the baseline is grey."""
COLOURS = ("#c2579b", "#8f6a3c", "#3aa6c9", "#6d58c4", "#b8a21f", "#c8503c", "#57a89a")
DASHES = ((), (6.0, 2.0), (1.5, 1.5), (7.0, 1.5, 1.5, 1.5))
"""Dash patterns of lines, in points on and off; empty: solid."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p")


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The style of one run's lines and bars."""

    colour: str
    dash: tuple[float, ...]
    marker: str

    @property
    def line(self) -> dict[str, Any]:
        """The arguments of a line for matplotlib."""
        return {"color": self.colour, "dashes": self.dash or (None, None)}


def looks(runs: Sequence[LabelledRun]) -> dict[str, Look]:
    """Styles by label; labels other than the paper's policies get colours by appearance."""
    labels = [*dict.fromkeys(run.label for run in runs)]
    others = [label for label in labels if label not in FIXED]
    found = {}
    for place, label in enumerate(labels):
        if label in FIXED:
            colour, dash = FIXED[label]
        else:
            index = others.index(label)
            colour = COLOURS[index % len(COLOURS)]
            # A repeated colour has another dash, and neighbours differ in both.
            dash = DASHES[(index + 2 * (index // len(COLOURS))) % len(DASHES)]
        found[label] = Look(colour=colour, dash=dash, marker=MARKERS[place % len(MARKERS)])
    return found
