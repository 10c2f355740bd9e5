"""When a workload can be done at the earliest, whoever schedules it. Pure.

With jobs j of release r, duration alone d and work w (GPU-seconds of training, which no sharing of
GPUs takes away), on m GPUs, nothing ends before

* the critical path, max over j of r + d;
* the area with releases, max over t of t + Σ_{r ≥ t} w / m, where t need only be a release.

Both hold for the jobs that must run on one type of nodes and its GPUs alone, too.
"""

from collections.abc import Mapping

from plexrl.sim.results.result import Bounds

RELEASES_MAX = 4096
"""Times of release that are told apart."""

FIRST_WIDTH_S = 2.0**-10


class DrainBound:
    """Lower bounds of the drain time, of jobs told one by one in any order, in constant memory.

    Jobs released within one bin of time count by the earliest of them: of the times t of the
    formula, some are passed over. The area is thus never too high, exact while there are at most
    `RELEASES_MAX` times of release, and too low by less than one bin otherwise, of which the trace
    has at least `RELEASES_MAX` / 2.
    """

    def __init__(self, gpus: Mapping[str, int]) -> None:
        """`gpus`: of the cluster, by type of node."""
        self._gpus = dict(gpus)
        self._all = _Releases()
        self._types: dict[str, _Releases] = {}
        self._critical_path_s = 0.0

    def add(self, release_s: float, alone_s: float, busy_gpu_s: float, node_type: str = "") -> None:
        """A job; `node_type`: the only one that it can run on (empty: any)."""
        self._critical_path_s = max(self._critical_path_s, release_s + alone_s)
        self._all.add(release_s, busy_gpu_s)
        if node_type in self._gpus and len(self._gpus) > 1:
            self._types.setdefault(node_type, _Releases()).add(release_s, busy_gpu_s)

    def bounds(self) -> Bounds:
        """Of the jobs so far."""
        areas = [self._all.area_s(sum(self._gpus.values()))]
        areas += [each.area_s(self._gpus[name]) for name, each in self._types.items()]
        return Bounds(critical_path_s=self._critical_path_s, area_s=max(areas))


class _Releases:
    """Work by the time from which it can be done."""

    def __init__(self) -> None:
        self._width_s = FIRST_WIDTH_S
        self._bins: dict[int, list[float]] = {}
        """By number: the earliest release in it, and its work."""

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
            # In order of time: the first one in a bin is the earliest.
            bins.setdefault(number // 2, [release_s, 0.0])[1] += work
        self._bins = bins

    def area_s(self, gpus: int) -> float:
        highest = work = 0.0
        for release_s, released in sorted(self._bins.values(), reverse=True):
            work += released
            highest = max(highest, release_s + work / gpus)
        return highest
