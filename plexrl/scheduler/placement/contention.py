"""What the members of a group will wait for each other once their phases have relaxed.

The overlap of footprints on the ring predicts no contention: a member that had to wait is late for
the rest of its cycle and all that follow, so that phases move until they stay out of each other's
way, or drift through each other where cycles vary (PlexRL §7.1). What stays is the law by which
they move. Here the group is a closed network of one server: each member thinks, asks for the
group, is served for a burst behind a switch, and thinks again, and turns are taken by the `hrrs`
rule. The network is followed for a fixed number of bursts, without a draw of chance: cycles vary by
quantiles of a lognormal law, each as often as the others, in fixed shuffled orders.

A prediction is a function of the residents alone, whatever order they are named in. It costs 2 to
3 µs a burst, so 1 to 2 ms, nearly however many residents there are.

Where the rule guards slack, plans matter after all: they say who has time of its own, and follow
each member to where it runs. So plans are laid here as the scheduler lays them, on the same ring.
Some residents have several ways of running that keep themselves up once they are in one: which it
is hangs on how they began, so the beginning is followed too, for members that came evenly spread.

Not modelled: priority classes, recoveries, prefetches (a load takes what it takes on average), and
rules of turns other than `hrrs`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from plexrl.scheduler.dispatch.hrrs import WEIGHT_MAX
from plexrl.scheduler.placement.cycle_quantiles import (
    ORDER_CYCLES,
    ORDERS,
    SHARED_PART,
    STREAMS,
    factors_of,
    spread_of,
)
from plexrl.scheduler.state.demand import DemandTrace, commensurate

BURSTS = 560
"""Followed in all, the warm-up not counted: more make a prediction dearer by as much, and less
uneven by the square root."""

WARM_UP_BURSTS = 64
"""Before anything is counted: phases relax within a few cycles."""

PAUSE_WEIGHT = 0.3
"""Of the newest pause in what a member's usual one is held to be."""

OVERDUE = 2.0
"""A member is expected until this many times its usual pause have passed."""

PHASE_TOLERANCE = 0.1
"""Part of the period by which a member may run beside its plan before the plan follows it."""

LATE_PART = 0.5
"""Of its usual pause, for which a critical member that is late still keeps guests out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resident:
    """A member as far as others wait for it."""

    trace: DemandTrace
    load_s: float = 0.0
    offload_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRule:
    """How the group takes turns, as far as it makes a difference here."""

    anticipates: bool = True
    """A group that nobody waits for is switched to whoever is expected first."""
    guards_slack: bool = False
    """Guests, whose plan overlaps with another's, wait for a gap between the bursts of those that
    have time of their own."""
    starvation_ratio: float = 2.0
    """Response ratio from which a guest waits no longer."""
    starvation_bound_s: float = 600.0
    """Of waiting, after which it does not either."""
    horizon_slots: int = 28_800
    """Of the ring that plans are laid on."""
    period_tolerance: float = 0.02
    """Part of a period by which a plan's may differ from it."""
    profile_cycles: int = 3
    """That a member's period is measured over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contention:
    """waiting / (waiting + running), 0 to 1, of each resident and of all together."""

    members: tuple[float, ...]
    """In the order in which the residents were given."""
    group: float
    """Mean over the members."""

    @property
    def worst(self) -> float:
        """Of the member that waits most."""
        return max(self.members)


def predict(
    residents: Sequence[Resident], rule: TurnRule | None = None, *, bursts: int = BURSTS
) -> Contention:
    """The contention of these residents on one group, at least one."""
    count = len(residents)
    # In an order of their own, so that it makes no difference in which they are named.
    order = sorted(range(count), key=lambda index: _sort_key(residents[index]))
    sharing = [residents[index] for index in order]
    if count == 1:
        return Contention(members=(0.0,), group=0.0)
    network = _Network(sharing, rule or TurnRule())
    network.run(WARM_UP_BURSTS)
    network.count_from_here()
    network.run(bursts)
    parts = network.waiting_parts()
    members = [0.0] * count
    for place, index in enumerate(order):
        # What equal residents wait for differs by the variation they drew only.
        alike = [parts[other] for other in range(count) if sharing[other] == sharing[place]]
        members[index] = math.fsum(alike) / len(alike)
    return Contention(members=tuple(members), group=math.fsum(members) / count)


class _Member:
    """A resident under way."""

    __slots__ = (
        "asked_at",
        "burst",
        "burst_s",
        "busy_factors",
        "counted_at",
        "cycles",
        "ended_at",
        "is_critical",
        "load_s",
        "offload_s",
        "own_factors",
        "own_order",
        "owns_time",
        "pause_s",
        "pauses_seen",
        "plan",
        "round",
        "segments",
        "shared_factors",
        "shared_order",
        "waited_s",
    )  # fmt: skip

    def __init__(self, number: int, resident: Resident, phase: float) -> None:
        self.load_s, self.offload_s = resident.load_s, resident.offload_s
        self.plan: _Plan | None = None
        self.is_critical = any(each.slack_s < each.duration_s for each in resident.trace.segments)
        self.owns_time = False
        round_trip_s = self.load_s + self.offload_s
        self.segments = _bursts(resident.trace, round_trip_s)
        """(seconds of the burst, of the pause behind it, slack)."""
        spread = spread_of(resident.trace)
        self.busy_factors = factors_of(spread)
        self.shared_factors = factors_of(spread * SHARED_PART)
        self.own_factors = factors_of(spread * math.sqrt(1.0 - SHARED_PART * SHARED_PART))
        stream = number % STREAMS
        self.shared_order, self.own_order = ORDERS[2 * stream], ORDERS[2 * stream + 1]
        self.round = 37 * (number // STREAMS) % ORDER_CYCLES
        self.burst = self.cycles = 0
        self.burst_s = self.segments[0][0]
        self.pause_s = self.segments[-1][1]
        # Nobody is expected before a pause of theirs has been seen; the first is before any burst.
        self.pauses_seen = -1
        # Where they begin makes no difference once they have relaxed: as far apart as can be.
        self.asked_at = phase * resident.trace.period_s
        self.ended_at = self.asked_at - self.pause_s
        self.waited_s = self.counted_at = 0.0


class _Plan:
    """A member's footprint on the ring."""

    __slots__ = ("cycles", "meets", "period", "segments", "shift", "slots")

    def __init__(self, trace: DemandTrace, rule: TurnRule) -> None:
        self.cycles = commensurate(trace.period_s, rule.horizon_slots, rule.period_tolerance)
        self.period = rule.horizon_slots / self.cycles
        stretch = self.period / trace.period_s
        self.segments = [(each.offset_s * stretch, each.duration_s) for each in trace.segments]
        self.shift = 0.0
        self.slots: list[tuple[int, int]] = []
        """(first, number) of each segment; none where nothing is planned yet."""
        self.meets: dict[int, float] = {}
        """By the other's cycles: slots after which the two stand to each other as before."""

    def is_beside(self, at: float) -> bool:
        """Whether a cycle that starts at `at` is no more where it was planned."""
        beside = (at - self.shift) % self.period
        return min(beside, self.period - beside) > PHASE_TOLERANCE * self.period

    def lay(self, at: float) -> None:
        """Plan a cycle to start at `at`; the edges of segments are rounded outward to slots."""
        self.shift = at
        self.slots = []
        for offset, duration in self.segments:
            start = math.floor(at + offset)
            self.slots.append((start, math.ceil(at + offset + duration) - start))

    def overlaps(self, other: "_Plan") -> bool:
        """Whether both are busy in a slot."""
        meets = self.meets.get(other.cycles)
        if meets is None:
            meets = self.period * self.cycles / math.lcm(self.cycles, other.cycles)
            self.meets[other.cycles] = meets
        for start, length in self.slots:
            for other_start, other_length in other.slots:
                after = (other_start - start) % meets
                if after < length or meets - after < other_length:
                    return True
        return False


class _Network:
    """All residents under way, and who holds the group."""

    def __init__(self, residents: Sequence[Resident], rule: TurnRule) -> None:
        self.rule = rule
        self.members = [
            _Member(number, each, number / len(residents)) for number, each in enumerate(residents)
        ]
        self.holder = min(self.members, key=lambda each: each.asked_at)
        self.now = self.holder.asked_at
        self.just_ended = False
        if rule.guards_slack:
            self._make_plans([each.trace for each in residents])

    def _make_plans(self, traces: Sequence[DemandTrace]) -> None:
        """Plans for members whose periods are measured well enough to be told from each other.

        Those of the others overlap with all: unequal periods of one ring come together somewhere.
        """
        for trace in traces:
            error_s = trace.jitter_s / math.sqrt(self.rule.profile_cycles)
            if error_s > self.rule.period_tolerance * trace.period_s:
                return
        # As placement lays them, one behind the other; who does not fit so is a guest at first.
        behind_s = float(math.floor(-self.members[0].pause_s))
        for member, trace in zip(self.members, traces, strict=True):
            member.plan = _Plan(trace, self.rule)
            member.plan.lay(behind_s)
            member.owns_time = member.is_critical and self._is_apart(member)
            last = trace.segments[-1]
            behind_s += math.ceil(last.offset_s + last.duration_s)

    def count_from_here(self) -> None:
        """Forget what was waited so far."""
        for member in self.members:
            member.waited_s = 0.0
            member.counted_at = member.asked_at

    def waiting_parts(self) -> list[float]:
        """Since counting began, of each member."""
        return [
            member.waited_s / (member.asked_at - member.counted_at)
            if member.asked_at > member.counted_at
            else 0.0
            for member in self.members
        ]

    def run(self, bursts: int) -> None:
        """Serve this many bursts."""
        while bursts > 0:
            holder, now = self.holder, self.now
            if not self.just_ended and holder.asked_at <= now:
                self._serve(holder)
                bursts -= 1
                continue
            first, is_alone = None, True
            for member in self.members:
                if member.asked_at <= now:
                    is_alone = first is None
                    first = member
                    if not is_alone:
                        break
            if first is None:
                bursts -= self._be_ready()
            elif is_alone and (first.plan is None or first.owns_time):
                # As mostly.
                if first is not holder:
                    self.now += holder.offload_s + first.load_s
                self._serve(first)
                bursts -= 1
            else:
                waiting = [member for member in self.members if member.asked_at <= now]
                bursts -= self._serve_one_of(waiting)

    def _serve_one_of(self, waiting: list[_Member]) -> bool:
        """Serve who is first, if it need not keep out of somebody's time."""
        first, wait_s = self._first_not_kept_out(waiting)
        if first is None:
            return self._look_out(wait_s)
        holder = self.holder
        if first is not holder:
            self.now += holder.offload_s + first.load_s
        self._serve(first)
        return True

    def _first_not_kept_out(self, waiting: list[_Member]) -> tuple[_Member | None, float]:
        """Who is first of those that may start, or until when to look again."""
        wait_s = math.inf
        while waiting:
            first = self._first(waiting)
            if first.plan is None or first.owns_time:
                return first, 0.0
            kept_out_s = self._kept_out_s(first)
            if kept_out_s <= 0.0:
                return first, 0.0
            wait_s = min(wait_s, kept_out_s)
            waiting = [member for member in waiting if member is not first]
        return None, wait_s

    def _be_ready(self) -> bool:
        """Nobody waits: have the group ready for whoever is expected."""
        self.just_ended = False
        holder = self.holder
        expected = self._expected(critical=False) if self.rule.anticipates else holder
        if expected is not holder:
            return self._switch_to(expected)
        soonest = math.inf
        for member in self.members:
            if member.asked_at < soonest:
                soonest = member.asked_at
        self.now = soonest
        return False

    def _look_out(self, wait_s: float) -> bool:
        """All who wait are kept out for this long: have the group ready for whoever keeps them."""
        self.just_ended = False
        holder = self.holder
        expected = self._expected(critical=True) if self.rule.anticipates else holder
        if expected is not holder:
            return self._switch_to(expected)
        until = self.now + wait_s
        for member in self.members:
            if self.now < member.asked_at < until:
                until = member.asked_at
        self.now = until
        return False

    def _switch_to(self, expected: _Member) -> bool:
        """Take the holder off the group, and serve the expected if it has asked by then."""
        self.now += self.holder.offload_s
        if expected.asked_at > self.now:
            came = [member for member in self.members if member.asked_at <= self.now]
            if came:
                expected = self._first_not_kept_out(came)[0] or expected
        self.now += expected.load_s
        self.holder = expected
        if expected.asked_at > self.now:
            return False
        self._serve(expected)
        return True

    def _follow(self, member: _Member, plan: _Plan) -> None:
        """Lay the plan where the member runs; whoever overlaps with nobody has time of its own."""
        plan.lay(member.asked_at)
        for each in self.members:
            if each is member or not each.owns_time:
                each.owns_time = each.is_critical and self._is_apart(each)

    def _is_apart(self, member: _Member) -> bool:
        plan = member.plan
        if plan is None:
            return False
        for other in self.members:
            if other is not member and other.plan is not None and plan.overlaps(other.plan):
                return False
        return True

    def _serve(self, member: _Member) -> None:
        plan = member.plan
        if plan is not None and member.burst == 0 and member.cycles > 0:
            # It follows a member that has left it, and one that has just been measured. The warm-up
            # ends inside the first burst: that a job publishes is known once it has.
            is_measured = member.cycles == self.rule.profile_cycles
            if is_measured or plan.is_beside(member.asked_at):
                self._follow(member, plan)
        member.pauses_seen += 1
        waited_s = self.now - member.asked_at
        member.waited_s += waited_s
        ended_at = self.now + member.burst_s
        member.ended_at = self.now = ended_at
        segments, burst = member.segments, member.burst
        _, pause_s, slack_s = segments[burst]
        burst += 1
        if burst == len(segments):
            burst = 0
            member.cycles += 1
            member.round = (member.round + 1) % len(member.shared_order)
        member.burst = burst
        shared = member.shared_order[member.round]
        own = member.own_order[member.round]
        pause_s *= member.shared_factors[shared] * member.own_factors[own]
        # A burst with slack delays what follows only by what it is late beyond that.
        caught_up_s = waited_s if waited_s < slack_s else slack_s
        pause_s -= caught_up_s if caught_up_s < pause_s else pause_s
        member.asked_at = ended_at + pause_s
        member.pause_s += PAUSE_WEIGHT * (pause_s - member.pause_s)
        member.burst_s = segments[burst][0] * member.busy_factors[shared]
        self.holder = member
        self.just_ended = True

    def _first(self, waiting: list[_Member]) -> _Member:
        """Highest response ratio with setup for a second of cycle."""
        if len(waiting) == 1:
            return waiting[0]
        best, best_urgency = waiting[0], -1.0
        holder, now = self.holder, self.now
        for member in waiting:
            effective_s = member.burst_s + 1e-9
            if member is not holder:
                effective_s += member.load_s + holder.offload_s
            cycle_s = member.asked_at - member.ended_at + member.burst_s
            cycle_s = min(max(cycle_s, effective_s), WEIGHT_MAX * effective_s)
            urgency = (now - member.asked_at + effective_s) / (effective_s * cycle_s)
            if urgency > best_urgency:
                best, best_urgency = member, urgency
        return best

    def _expected(self, *, critical: bool) -> _Member:
        """Who is due first; `critical`: of those with time of their own that have not asked yet."""
        now = self.now
        expected, soonest = self.holder, math.inf
        for member in self.members:
            ended_at, pause_s = member.ended_at, member.pause_s
            due = ended_at + pause_s
            if due >= soonest or member.pauses_seen == 0 or now > ended_at + OVERDUE * pause_s:
                continue
            if not critical or (member.asked_at > now and member.owns_time):
                expected, soonest = member, due
        return expected

    def _kept_out_s(self, guest: _Member) -> float:
        """Until the guest should look again; 0: it may start."""
        effective_s = guest.burst_s + 1e-9
        if guest is not self.holder:
            effective_s += guest.load_s + self.holder.offload_s
        patience_s = (self.rule.starvation_ratio - 1.0) * effective_s
        patience_s = min(patience_s, self.rule.starvation_bound_s)
        left_s = guest.asked_at + patience_s - self.now
        if left_s <= 1e-9:
            return 0.0
        due = [
            member.ended_at + member.pause_s - self.now
            for member in self.members
            if member is not guest
            and member.owns_time
            and member.pauses_seen > 0
            and member.asked_at > self.now
            and self.now <= member.ended_at + (1.0 + LATE_PART) * member.pause_s
        ]
        critical_s = max(0.0, min(due, default=math.inf))
        if effective_s + guest.load_s + guest.offload_s <= critical_s:
            return 0.0
        return max(0.001, min(left_s, critical_s + effective_s))


def _sort_key(resident: Resident) -> tuple[float, ...]:
    """All that makes residents different."""
    trace = resident.trace
    segments = (
        value for each in trace.segments for value in (each.offset_s, each.duration_s, each.slack_s)
    )
    switch = (resident.load_s, resident.offload_s)
    return (trace.period_s, trace.jitter_s, *switch, *segments)


def _bursts(trace: DemandTrace, round_trip_s: float) -> list[tuple[float, float, float]]:
    """(seconds, pause behind, slack) of a cycle's bursts: segments nearer to each other than a
    switch away and back are one, with the gap."""
    ends_s = [each.offset_s + each.duration_s for each in trace.segments]
    starts_s = [each.offset_s for each in trace.segments[1:]]
    starts_s.append(trace.segments[0].offset_s + trace.period_s)
    found: list[tuple[float, float, float]] = []
    start_s = trace.segments[0].offset_s
    for index, (end_s, next_s) in enumerate(zip(ends_s, starts_s, strict=True)):
        last = index + 1 == len(ends_s)
        if last or next_s - end_s > round_trip_s:
            pause_s = max(0.0, next_s - end_s)
            found.append((end_s - start_s, pause_s, trace.segments[index].slack_s))
            start_s = next_s
    return found
