"""When an engine's tensor-parallel groups change, and to which size (PAT Alg. 1).

The algorithm of the paper compares two futures: a switch now, and none. Where the rows are few in a
while and many now, both lose against a switch later, and the first one wins too early. So a switch
may also come later here, and more than one: of all plans that switch at some rows' ends, the one
with the least predicted time is found, and the engine switches if that plan begins with a switch.
With `moments_max=1` a plan can switch only now: that is Alg. 1.

The next round begins with groups of one size, so each plan also counts the switch back to it.

A switch is never cheaper than its predicted cost: staying wins a tie.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from plexrl.errors import InvalidRequestError
from plexrl.rollout.policies.adaptive_tp.predictor import KvHandling, LatencyPredictor, SwitchCost
from plexrl.rollout.policies.adaptive_tp.remaining import GroupLoad, Groups, UnfinishedRow, deal


@dataclass(frozen=True, slots=True, kw_only=True)
class TpSwitch:
    """An engine is to switch now."""

    tp: int
    """New size of its groups."""
    kv: KvHandling
    gain_s: float
    """Predicted seconds by which the rest is faster than without any further switch."""


class SwitchController:
    """Decides for engines of one profile. It keeps no state."""

    def __init__(self, predictor: LatencyPredictor, *, moments_max: int = 16) -> None:
        """`moments_max`: moments of a plan at which it may switch: now, and ends of rows.

        Raises:
            InvalidRequestError: `moments_max` is below 1.
        """
        if moments_max < 1:
            raise InvalidRequestError(f"moments_max is {moments_max}: set it to 1 or more")
        self._predictor = predictor
        self._moments_max = moments_max

    def decide(self, tp: int, groups: Groups, first_tp: int | None = None) -> TpSwitch | None:
        """The switch that pays now; None: none does.

        `tp` is the size of the engine's groups, `groups` their unfinished rows. Rows that end are
        not replaced by others. `first_tp`: size with which the next round begins; None: any.
        """
        rows = [row for group in groups for row in group if row.left > 0]
        if not rows:
            return None
        now = GroupLoad(tp, [[row for row in group if row.left > 0] for group in groups])
        loads = {size: self._dealt(size, rows) for size in self._predictor.sizes}
        cuts = self._cuts(rows)
        switch_s = self._predictor.profile.switch_s
        back_s = {size: 0.0 if first_tp in (None, size) else switch_s for size in loads}
        after = self._plan(loads, cuts, back_s)
        stays = now.stretches_s(self._predictor, cuts)
        # Until its first switch the engine has its groups as they are.
        best_s = stay_s = sum(stays) + back_s.get(tp, 0.0)
        for index in range(1, len(stays)):
            begin_s = sum(stays[:index])
            for size in loads:
                if size != tp:
                    cost = self._cost(now, loads[size], cuts[index])
                    best_s = min(best_s, begin_s + cost.seconds + after[index][size])
        found: TpSwitch | None = None
        for size in loads:
            if size == tp:
                continue
            cost = self._cost(now, loads[size], 0)
            total_s = cost.seconds + after[0][size]
            if total_s < best_s:
                best_s = total_s
                found = TpSwitch(tp=size, kv=cost.kv, gain_s=stay_s - total_s)
        return found

    def _dealt(self, tp: int, rows: Sequence[UnfinishedRow]) -> GroupLoad:
        return GroupLoad(tp, deal(rows, self._predictor.sizes[-1] // tp))

    def _cuts(self, rows: Sequence[UnfinishedRow]) -> list[int]:
        """The moments at which a plan may switch, in steps from now, and the end."""
        ends = sorted({row.left for row in rows})
        between = ends[:-1]
        # The last ends are those with few rows, where a switch matters most: they are further
        # apart, so equal parts of the ends keep them.
        step = -(-len(between) // max(1, self._moments_max - 1))
        kept = between[::-1][::step][::-1] if self._moments_max > 1 and between else []
        return [0, *kept, ends[-1]]

    def _plan(
        self, loads: dict[int, GroupLoad], cuts: Sequence[int], back_s: dict[int, float]
    ) -> list[dict[int, float]]:
        """By moment and size: the least seconds until the end, with the groups of this size then,
        and of the switch back. Later switches are planned backwards from the end."""
        stretches = {s: load.stretches_s(self._predictor, cuts) for s, load in loads.items()}
        best: list[dict[int, float]] = [back_s]
        for index in reversed(range(len(cuts) - 1)):
            # A switch at a moment is to the size that stays until the next one at least.
            stay = {size: stretches[size][index] + best[0][size] for size in loads}
            found = dict(stay)
            for size in loads if index else ():
                for new in loads:
                    if new != size:
                        cost = self._cost(loads[size], loads[new], cuts[index])
                        found[size] = min(found[size], cost.seconds + stay[new])
            best.insert(0, found)
        return best

    def _cost(self, load: GroupLoad, new: GroupLoad, steps: int) -> SwitchCost:
        """T_switch after so many steps."""
        predictor = self._predictor
        tokens = max(total for _, total, _ in load.at(steps))
        prefill_s = max(predictor.prefill_s(new.tp, rows, rms) for rows, _, rms in new.at(steps))
        return predictor.switch_cost(predictor.move_s(load.tp, new.tp, tokens), prefill_s)
