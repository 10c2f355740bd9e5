"""Blocks of the topology: labels such as `row1/rack3`, from the widest part to the narrowest.

Two blocks are the nearer the more leading parts their labels share.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Final

SEPARATOR: Final = "/"
_NUMBER: Final = re.compile(r"(\d+)")


def natural_order(label: str) -> tuple[tuple[tuple[str, int, str], ...], ...]:
    """Sort key of a label: `rack9` is before `rack10`, and all of a row before the next row."""
    return tuple(_part_order(part) for part in label.split(SEPARATOR))


def _part_order(part: str) -> tuple[tuple[str, int, str], ...]:
    pieces = _NUMBER.split(part)
    # Text and digits by turns.
    texts, digits = pieces[::2], [*pieces[1::2], ""]
    # The digits themselves tell `1` from `01`.
    return tuple((text, int(each or "-1"), each) for text, each in zip(texts, digits, strict=True))


def common_part(labels: Iterable[str]) -> str:
    """The leading parts that all labels share; empty: none."""
    split = [label.split(SEPARATOR) for label in labels]
    if not split:
        return ""
    shared = []
    for parts in zip(*split, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return SEPARATOR.join(shared)


def nearest_blocks(free_gpus: Mapping[str, int], count: int) -> list[str]:
    """The blocks of the narrowest part of the topology with `count` free GPUs, in natural order.
    Among parts of equal depth, the one with the fewest free GPUs is taken, so that larger groups
    still find one."""
    order = sorted(free_gpus, key=natural_order)
    split = {label: label.split(SEPARATOR) for label in order}
    depth = max((len(parts) for parts in split.values()), default=0)
    for shared in range(depth - 1, 0, -1):
        inside: dict[tuple[str, ...], list[str]] = {}
        for label in order:
            if len(split[label]) >= shared:
                inside.setdefault(tuple(split[label][:shared]), []).append(label)
        sizes = [
            (sum(free_gpus[label] for label in labels), place)
            for place, labels in enumerate(inside.values())
        ]
        enough = [size for size in sizes if size[0] >= count]
        if enough:
            return list(inside.values())[min(enough)[1]]
    return order
