"""How runs look: one colour, dash and marker for a name over all plots. Pure.

Colour-blind readers can tell the colours apart as far as ten can be (after Okabe and Ito, without
those that vanish on white or on black); dashes and markers carry the rest.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from plexrl.sim.report.comparison import BASELINE, Run

BASELINE_COLOUR = "#858c94"
COLOURS = (
    *("#d9822b", "#3d9a50", "#2a6fbb", "#c2579b", "#8f6a3c", "#3aa6c9", "#6d58c4"),
    *("#b8a21f", "#c8503c"),
)
JOB_COLOURS = (
    *("#2a6fbb", "#e69f00", "#3d9a50", "#c2579b", "#56b4e9", "#d55e00", "#8e5bb5", "#a8a13a"),
)
SWITCH_COLOUR = "#1d2733"
DASHES = ((), (6.0, 2.0), (1.5, 1.5), (7.0, 1.5, 1.5, 1.5))
"""Of lines, in points on and off; none: solid."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p")


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """Of one run's lines and bars."""

    colour: str
    dash: tuple[float, ...]
    marker: str


def looks(runs: Sequence[Run]) -> dict[str, Look]:
    """By label, in order of appearance; the baseline is grey wherever it stands."""
    labels = dict.fromkeys(run.label for run in runs)
    found = {BASELINE: Look(colour=BASELINE_COLOUR, dash=DASHES[1], marker=MARKERS[0])}
    for index, label in enumerate(label for label in labels if label != BASELINE):
        found[label] = Look(
            colour=COLOURS[index % len(COLOURS)],
            # A colour that comes again has another dash, and neighbours differ in both.
            dash=DASHES[(index + index // len(COLOURS)) % len(DASHES)],
            marker=MARKERS[(index + 1) % len(MARKERS)],
        )
    return found
