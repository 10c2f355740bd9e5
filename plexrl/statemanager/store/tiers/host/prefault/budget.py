"""How much of the host tier is made ready in advance. Pure."""

from typing import Final

RESERVE: Final = 1 / 16
"""Part of the machine's memory that is left to others."""


def may_prefault(nbytes: int, *, usable_bytes: int, available_bytes: int) -> bool:
    """Whether the machine has so much to spare now.

    Args:
        nbytes: what is to be allocated next.
        usable_bytes: memory that this process's control group may use.
        available_bytes: how much of it is left.
    """
    return available_bytes - nbytes >= int(usable_bytes * RESERVE)


def emptiest(nodes: tuple[int, ...], bytes_on: dict[int | None, int]) -> tuple[int, ...]:
    """The memory node for the next segment, of several; so each gets as much as the others.

    Args:
        nodes: those of the pool; less than two: the result is the same.
        bytes_on: bytes of the segments on each.
    """
    return nodes if len(nodes) < 2 else (min(nodes, key=lambda one: (bytes_on.get(one, 0), one)),)
