"""Lower bounds of the drain time, for any scheduler. Pure.

For jobs with release r, duration alone d and work w (GPU-seconds of training, which sharing does
not reduce), on m GPUs, the drain time is at least the greater of the two terms below. Neither d nor
w may contain what a scheduler can hide or avoid, such as moves of state.

* the critical path, max over jobs of r + d;
* the area with releases, max over release times t of t + Σ_{r ≥ t} w / m.

Both also hold for the jobs that need one node type, with the GPUs of that type.
"""

from collections.abc import Mapping

from plexrl.sim.results.result import DrainBounds

RELEASES_MAX = 4096
"""Most bins of release times."""

FIRST_WIDTH_S = 2.0**-10


class DrainBound:
    """Computes the lower bounds in constant memory; jobs may be added in any order.

    Jobs released within one time bin count as released at the earliest of them, so some times t of
    the formula are skipped. The area is never too high. It is exact for at most `RELEASES_MAX`
    release times; otherwise it is too low by less than one bin, of which the trace has at least
    `RELEASES_MAX` / 2.
    """

    def __init__(self, gpus: Mapping[str, int]) -> None:
        """`gpus`: GPUs of the cluster by node type."""
        self._gpus = dict(gpus)
        self._all = _Releases()
        self._types: dict[str, _Releases] = {}
        self._critical_path_s = 0.0

    def add(self, release_s: float, alone_s: float, busy_gpu_s: float, node_type: str = "") -> None:
        """Add a job; `node_type`: the only type that it can run on (empty: any)."""
        self._critical_path_s = max(self._critical_path_s, release_s + alone_s)
        self._all.add(release_s, busy_gpu_s)
        if node_type in self._gpus and len(self._gpus) > 1:
            self._types.setdefault(node_type, _Releases()).add(release_s, busy_gpu_s)

    def bounds(self) -> DrainBounds:
        """The bounds for the jobs so far."""
        areas = [self._all.area_s(sum(self._gpus.values()))]
        areas += [each.area_s(self._gpus[name]) for name, each in self._types.items()]
        return DrainBounds(critical_path_s=self._critical_path_s, area_s=max(areas))


class _Releases:
    """Work by release time."""

    def __init__(self) -> None:
        self._width_s = FIRST_WIDTH_S
        self._bins: dict[int, list[float]] = {}
        """Earliest release and total work of each bin, by bin number."""

    def add(self, release_s: float, work: float) -> None:
        found = self._bins.setdefault(int(release_s / self._width_s), [release_s, 0.0])
        found[0] = min(found[0], release_s)
        found[1] += work
        while len(self._bins) > RELEASES_MAX:
            self._widen()

    def _widen(self) -> None:
        self._width_s *= 2
        bins: dict[int, list[float]] = {}
        for number, (release_s, work) in sorted(self._bins.items()):
            # Sorted by time: the first release in a bin is the earliest.
            bins.setdefault(number // 2, [release_s, 0.0])[1] += work
        self._bins = bins

    def area_s(self, gpus: int) -> float:
        highest = work = 0.0
        for release_s, released in sorted(self._bins.values(), reverse=True):
            work += released
            highest = max(highest, release_s + work / gpus)
        return highest
