"""Cache of plans, by the layouts of sources and targets. Pure."""

from collections import OrderedDict
from collections.abc import Sequence

from plexrl.errors import InvalidRequestError
from plexrl.statemanager.layout.plan.balance import PullSource
from plexrl.statemanager.layout.plan.columns import Layout
from plexrl.statemanager.layout.plan.plan import Plan, make_plan

_Key = tuple[tuple[tuple[str, str, str, float, float], ...], tuple[str, ...]]


class PlanCache:
    """The most recently used plans. Not thread-safe."""

    def __init__(self, plans_max: int = 16) -> None:
        """`plans_max`: a plan of 100 000 transfers takes about 20 MB."""
        if plans_max < 1:
            raise InvalidRequestError("plans_max must be at least 1")
        self._plans_max = plans_max
        self._plans: OrderedDict[_Key, Plan] = OrderedDict()

    def __len__(self) -> int:
        return len(self._plans)

    def plan(self, sources: Sequence[PullSource], targets: Sequence[Layout]) -> Plan:
        """As `make_plan`; takes microseconds if the plan is cached."""
        key = (
            tuple((s.id, s.link, s.layout.digest, s.bytes_per_s, s.request_s) for s in sources),
            tuple(layout.digest for layout in targets),
        )
        found = self._plans.get(key)
        if found is None:
            found = self._plans[key] = make_plan(sources, targets)
            if len(self._plans) > self._plans_max:
                self._plans.popitem(last=False)
        self._plans.move_to_end(key)
        return found
