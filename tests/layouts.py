"""Every parallel layout of a bounded number of ranks."""

from collections.abc import Iterator

from plexrl.model.parallelism import Parallelism

RANKS_MAX = 64


def layouts(*, experts: bool) -> Iterator[Parallelism]:
    """All layouts up to `RANKS_MAX` ranks, with every expert axis or with none."""
    for tp in range(1, RANKS_MAX + 1):
        for cp in range(1, RANKS_MAX // tp + 1):
            for dp in range(1, RANKS_MAX // (tp * cp) + 1):
                for pp in range(1, RANKS_MAX // (tp * cp * dp) + 1):
                    for ep in range(1, tp * dp * cp + 1 if experts else 2):
                        if tp * dp * cp % ep == 0:
                            yield Parallelism(dp=dp, tp=tp, pp=pp, cp=cp, ep=ep)


LAYOUTS = tuple(layouts(experts=True))
DENSE_LAYOUTS = tuple(layouts(experts=False))
