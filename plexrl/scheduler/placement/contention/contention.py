"""Predicts what part of its time each member of a group will wait for the others.

Overlap of the footprints on the ring does not predict contention. A member that waited is late for
the rest of its cycle and for all later cycles, so phases drift until they no longer collide, or
keep drifting through each other if cycles vary (PlexRL §7.1). This module follows the drift: the
group is a closed queueing network with one server. Each member pauses, requests the group, is
served for a burst after a switch, and pauses again; `dispatch.hrrs` gives the order. The network is
followed for a fixed number of bursts. No random draws: cycles vary by the quantiles of a lognormal
distribution, each equally often, in fixed shuffled orders.

A prediction depends on the set of residents only, not on their order. It costs 2 to 3 µs a burst,
so 1 to 2 ms for almost any number of residents.

With the slack guard, plans matter: they decide who has exclusive slots, and they move when their
member leaves them. The module therefore lays plans on the same ring as the scheduler does.
Some sets of residents have several stable phase patterns, and the start decides which one they
reach; the members start evenly spaced.

Not modelled: priority classes, recoveries, prefetches (a load takes its average time), and orders
other than `hrrs`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from plexrl.scheduler.placement.capacity.shift_search import is_off_plan
from plexrl.scheduler.placement.contention.cycle_quantiles import (
    ORDER_CYCLES,
    ORDERS,
    SHARED_PART,
    STREAMS,
    factors_of,
    spread_of,
)
from plexrl.scheduler.rules.hrrs import guard_ends_at, starves_at, urgency_of
from plexrl.scheduler.rules.next_use import EXPECTED_PAUSES, OVERDUE_PART
from plexrl.scheduler.state.demand.estimates import WEIGHT
from plexrl.scheduler.state.demand.trace import DemandTrace, commensurate

BURSTS = 560
"""Bursts followed after the warm-up. The cost of a prediction grows in proportion, its noise falls
with the square root."""

WARM_UP_BURSTS = 64
"""Bursts before counting begins: phases settle within a few cycles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resident:
    """A member: its demand and the cost of switching to and from it."""

    trace: DemandTrace
    load_s: float = 0.0
    offload_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentionConfig:
    """The settings of dispatch that change the prediction."""

    anticipates: bool = True
    """An idle group switches to the member that is expected first."""
    guards_slack: bool = False
    """Guests (members whose plan overlaps another) wait for a gap between the bursts of members
    with exclusive slots."""
    starvation_ratio: float = 2.0
    """Response ratio at which a guest stops waiting for a gap."""
    starvation_bound_s: float = 600.0
    """Seconds of waiting after which a member goes first, and a guest stops waiting for a gap."""
    horizon_slots: int = 28_800
    """Length of the ring on which plans are laid."""
    period_tolerance: float = 0.02
    """Largest difference between the planned and the measured period, as a part of the period."""
    profile_cycles: int = 3
    """Cycles over which a member's period is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contention:
    """waiting / (waiting + running), 0 to 1, of each resident and of all together."""

    members: tuple[float, ...]
    """In the order of the given residents."""
    group: float
    """Mean over the members."""


def predict(
    residents: Sequence[Resident], config: ContentionConfig | None = None, *, bursts: int = BURSTS
) -> Contention:
    """The contention of these residents (at least one) on one group."""
    count = len(residents)
    # A canonical order, so that the order of the arguments makes no difference.
    order = sorted(range(count), key=lambda index: _sort_key(residents[index]))
    sharing = [residents[index] for index in order]
    if count == 1:
        return Contention(members=(0.0,), group=0.0)
    network = _Network(sharing, config or ContentionConfig())
    network.run(WARM_UP_BURSTS)
    network.start_counting()
    network.run(bursts)
    parts = network.waiting_parts()
    members = [0.0] * count
    for position, index in enumerate(order):
        # Equal residents differ by their stream of variation only: report their mean.
        equal = [parts[other] for other in range(count) if sharing[other] == sharing[position]]
        members[index] = math.fsum(equal) / len(equal)
    return Contention(members=tuple(members), group=math.fsum(members) / count)


class _Member:
    """The state of one resident in the network."""

    __slots__ = (
        "burst",
        "burst_s",
        "busy_factors",
        "counted_at",
        "cycles",
        "ended_at",
        "has_exclusive_slots",
        "has_worked",
        "is_critical",
        "load_s",
        "offload_s",
        "own_factors",
        "own_order",
        "pause_s",
        "plan",
        "requested_at",
        "round",
        "segments",
        "shared_factors",
        "shared_order",
        "waited_s",
    )  # fmt: skip

    def __init__(self, number: int, resident: Resident, phase: float) -> None:
        self.load_s, self.offload_s = resident.load_s, resident.offload_s
        self.plan: _Plan | None = None
        self.is_critical = resident.trace.has_critical
        self.has_exclusive_slots = False
        round_trip_s = self.load_s + self.offload_s
        self.segments = _bursts(resident.trace, round_trip_s)
        """(seconds of the burst, seconds of the pause after it, slack)."""
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
        # A member is expected only after its first burst.
        self.has_worked = False
        # Evenly spaced starts.
        self.requested_at = phase * resident.trace.period_s
        self.ended_at = self.requested_at - self.pause_s
        self.waited_s = self.counted_at = 0.0


class _Plan:
    """A member's footprint on the ring."""

    __slots__ = ("cycles", "period", "repeat_slots", "segments", "shift", "slots")

    def __init__(self, trace: DemandTrace, config: ContentionConfig) -> None:
        self.cycles = commensurate(trace.period_s, config.horizon_slots, config.period_tolerance)
        self.period = config.horizon_slots / self.cycles
        stretch = self.period / trace.period_s
        self.segments = [
            (segment.offset_s * stretch, segment.duration_s) for segment in trace.segments
        ]
        self.shift = 0.0
        self.slots: list[tuple[int, int]] = []
        """(first slot, number of slots) of each segment; empty before the first `lay`."""
        self.repeat_slots: dict[int, float] = {}
        """By the cycles of another plan: slots after which the relative position repeats."""

    def lay(self, at: float) -> None:
        """Plan a cycle that starts at `at`; edges of segments are rounded outward to slots."""
        self.shift = at
        self.slots = []
        for offset, duration in self.segments:
            start = math.floor(at + offset)
            self.slots.append((start, math.ceil(at + offset + duration) - start))

    def overlaps(self, other: "_Plan") -> bool:
        """Whether both plans are busy in some slot."""
        repeat = self.repeat_slots.get(other.cycles)
        if repeat is None:
            repeat = self.period * self.cycles / math.lcm(self.cycles, other.cycles)
            self.repeat_slots[other.cycles] = repeat
        for start, length in self.slots:
            for other_start, other_length in other.slots:
                after = (other_start - start) % repeat
                if after < length or repeat - after < other_length:
                    return True
        return False


class _Network:
    """All residents, and the holder of the group."""

    def __init__(self, residents: Sequence[Resident], config: ContentionConfig) -> None:
        self.config = config
        self.members = [
            _Member(number, each, number / len(residents)) for number, each in enumerate(residents)
        ]
        self.holder = min(self.members, key=lambda each: each.requested_at)
        self.now = self.holder.requested_at
        self.just_ended = False
        if config.guards_slack:
            self._make_plans([resident.trace for resident in residents])

    def _make_plans(self, traces: Sequence[DemandTrace]) -> None:
        """Lay plans, if the periods are measured well enough to tell them apart.

        Unequal periods on one ring overlap somewhere, so without that nobody has exclusive slots.
        """
        for trace in traces:
            error_s = trace.jitter_s / math.sqrt(self.config.profile_cycles)
            if error_s > self.config.period_tolerance * trace.period_s:
                return
        # One after the other, as placement lays them; a member that does not fit starts as a guest.
        next_start_s = float(math.floor(-self.members[0].pause_s))
        for member, trace in zip(self.members, traces, strict=True):
            member.plan = _Plan(trace, self.config)
            member.plan.lay(next_start_s)
            member.has_exclusive_slots = member.is_critical and self._is_apart(member)
            last = trace.segments[-1]
            next_start_s += math.ceil(last.offset_s + last.duration_s)

    def start_counting(self) -> None:
        """Reset the waiting times."""
        for member in self.members:
            member.waited_s = 0.0
            member.counted_at = member.requested_at

    def waiting_parts(self) -> list[float]:
        """waiting / (waiting + running) of each member since counting began."""
        return [
            member.waited_s / (member.requested_at - member.counted_at)
            if member.requested_at > member.counted_at
            else 0.0
            for member in self.members
        ]

    def run(self, bursts: int) -> None:
        """Serve this many bursts."""
        while bursts > 0:
            holder, now = self.holder, self.now
            if not self.just_ended and holder.requested_at <= now:
                self._serve(holder)
                bursts -= 1
                continue
            first, is_alone = None, True
            for member in self.members:
                if member.requested_at <= now:
                    is_alone = first is None
                    first = member
                    if not is_alone:
                        break
            if first is None:
                bursts -= self._anticipate()
            elif is_alone and (first.plan is None or first.has_exclusive_slots):
                # The common case.
                if first is not holder:
                    self.now += holder.offload_s + first.load_s
                self._serve(first)
                bursts -= 1
            else:
                waiting = [member for member in self.members if member.requested_at <= now]
                bursts -= self._serve_one_of(waiting)

    def _serve_one_of(self, waiting: list[_Member]) -> bool:
        """Serve the first member that the slack guard lets start."""
        first, wait_s = self._first_allowed(waiting)
        if first is None:
            return self._anticipate_critical(wait_s)
        holder = self.holder
        if first is not holder:
            self.now += holder.offload_s + first.load_s
        self._serve(first)
        return True

    def _first_allowed(self, waiting: list[_Member]) -> tuple[_Member | None, float]:
        """(the first member that may start, 0), or (None, seconds until the next check)."""
        wait_s = math.inf
        while waiting:
            first = self._first(waiting)
            if first.plan is None or first.has_exclusive_slots:
                return first, 0.0
            held_back_s = self._held_back_s(first)
            if held_back_s <= 0.0:
                return first, 0.0
            wait_s = min(wait_s, held_back_s)
            waiting = [member for member in waiting if member is not first]
        return None, wait_s

    def _anticipate(self) -> bool:
        """No member waits: switch to the one that is expected first."""
        self.just_ended = False
        holder = self.holder
        expected = self._expected(critical=False) if self.config.anticipates else holder
        if expected is not holder:
            return self._switch_to(expected)
        soonest = math.inf
        for member in self.members:
            if member.requested_at < soonest:
                soonest = member.requested_at
        self.now = soonest
        return False

    def _anticipate_critical(self, wait_s: float) -> bool:
        """The guard holds back all waiting members for `wait_s`: switch to the member with
        exclusive slots that is expected first."""
        self.just_ended = False
        holder = self.holder
        expected = self._expected(critical=True) if self.config.anticipates else holder
        if expected is not holder:
            return self._switch_to(expected)
        until = self.now + wait_s
        for member in self.members:
            if self.now < member.requested_at < until:
                until = member.requested_at
        self.now = until
        return False

    def _switch_to(self, expected: _Member) -> bool:
        """Offload the holder, load `expected`, and serve it if it has requested the group by then.
        True if a burst was served."""
        self.now += self.holder.offload_s
        if expected.requested_at > self.now:
            waiting = [member for member in self.members if member.requested_at <= self.now]
            if waiting:
                expected = self._first_allowed(waiting)[0] or expected
        self.now += expected.load_s
        self.holder = expected
        if expected.requested_at > self.now:
            return False
        self._serve(expected)
        return True

    def _follow(self, member: _Member, plan: _Plan) -> None:
        """Move the plan to where the member runs, and update who has exclusive slots."""
        plan.lay(member.requested_at)
        for each in self.members:
            if each is member or not each.has_exclusive_slots:
                each.has_exclusive_slots = each.is_critical and self._is_apart(each)

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
            # A plan follows a member that left it, or that was just measured.
            is_measured = member.cycles == self.config.profile_cycles
            if is_measured or is_off_plan(member.requested_at, plan.shift, plan.period):
                self._follow(member, plan)
        member.has_worked = True
        waited_s = self.now - member.requested_at
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
        # A burst with slack delays the next one only by the lateness beyond its slack.
        caught_up_s = waited_s if waited_s < slack_s else slack_s
        pause_s -= caught_up_s if caught_up_s < pause_s else pause_s
        member.requested_at = ended_at + pause_s
        member.pause_s += WEIGHT * (pause_s - member.pause_s)
        member.burst_s = segments[burst][0] * member.busy_factors[shared]
        self.holder = member
        self.just_ended = True

    def _first(self, waiting: list[_Member]) -> _Member:
        """The member that goes first by `hrrs`."""
        if len(waiting) == 1:
            return waiting[0]
        holder, now = self.holder, self.now
        best, oldest, best_urgency = waiting[0], waiting[0], -1.0
        for member in waiting:
            requested_at = member.requested_at
            effective_s = member.burst_s + 1e-9
            if member is not holder:
                effective_s += member.load_s + holder.offload_s
            cycle_s = requested_at - member.ended_at + member.burst_s
            urgency = urgency_of(now - requested_at, effective_s, cycle_s)
            if urgency > best_urgency:
                best, best_urgency = member, urgency
            if requested_at < oldest.requested_at:
                oldest = member
        is_starving = now >= starves_at(oldest.requested_at, self.config.starvation_bound_s)
        return oldest if is_starving else best

    def _expected(self, *, critical: bool) -> _Member:
        """The member that is due first; `critical`: only members with exclusive slots that have not
        requested the group yet."""
        now = self.now
        expected, soonest = self.holder, math.inf
        for member in self.members:
            ended_at, pause_s = member.ended_at, member.pause_s
            due = ended_at + pause_s
            if (
                due >= soonest
                or not member.has_worked
                or now > ended_at + EXPECTED_PAUSES * pause_s
            ):
                continue
            if not critical or (member.requested_at > now and member.has_exclusive_slots):
                expected, soonest = member, due
        return expected

    def _held_back_s(self, guest: _Member) -> float:
        """Seconds until the guest must be checked again (`slack_guard.holds_back`); 0: it may
        start."""
        effective_s = guest.burst_s + 1e-9
        if guest is not self.holder:
            effective_s += guest.load_s + self.holder.offload_s
        ends_at = guard_ends_at(
            guest.requested_at,
            guest.requested_at,
            effective_s,
            ratio=self.config.starvation_ratio,
            bound_s=self.config.starvation_bound_s,
        )
        left_s = ends_at - self.now
        if left_s <= 1e-9:
            return 0.0
        due = [
            member.ended_at + member.pause_s - self.now
            for member in self.members
            if member is not guest
            and member.has_exclusive_slots
            and member.has_worked
            and member.requested_at > self.now
            and self.now <= member.ended_at + (1.0 + OVERDUE_PART) * member.pause_s
        ]
        critical_s = max(0.0, min(due, default=math.inf))
        if effective_s + guest.load_s + guest.offload_s <= critical_s:
            return 0.0
        return max(0.001, min(left_s, critical_s + effective_s))


def _sort_key(resident: Resident) -> tuple[float, ...]:
    """Every field in which residents can differ."""
    trace = resident.trace
    segments = (
        value
        for segment in trace.segments
        for value in (segment.offset_s, segment.duration_s, segment.slack_s)
    )
    switch = (resident.load_s, resident.offload_s)
    return (trace.period_s, trace.jitter_s, *switch, *segments)


def _bursts(trace: DemandTrace, round_trip_s: float) -> list[tuple[float, float, float]]:
    """(seconds, pause after it, slack) of each burst of a cycle. Segments closer together than a
    switch away and back form one burst, which includes the gap."""
    ends_s = [segment.offset_s + segment.duration_s for segment in trace.segments]
    starts_s = [segment.offset_s for segment in trace.segments[1:]]
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
