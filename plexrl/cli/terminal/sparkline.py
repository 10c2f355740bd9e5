"""A line of values in one row of text."""

from collections.abc import Sequence

BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int = 30) -> str:
    """`values` (0 to 1) as at most `width` block characters."""
    if not values:
        return ""
    stride = max(1, -(-len(values) // width))
    means = [
        sum(values[i : i + stride]) / len(values[i : i + stride])
        for i in range(0, len(values), stride)
    ]
    top = len(BLOCKS) - 1
    return "".join(BLOCKS[min(top, max(0, round(value * top)))] for value in means)
