"""The eviction policy against an oracle that tries every choice."""

from itertools import chain, combinations

from hypothesis import example, given
from hypothesis import strategies as st

from plexrl.statemanager.store.tiers.eviction.policy import (
    EvictionCandidate,
    EvictionPlan,
    TierName,
    TierUsage,
    expected_use,
    plan_eviction,
)

HOST, NVME = TierName.HOST, TierName.NVME
Node = tuple[list[EvictionCandidate], TierUsage, TierUsage]


@st.composite
def nodes(draw: st.DrawFn) -> Node:
    """A few versions in two tiers, within the capacities; often there is little space, and often
    sizes and spaces are equal."""
    sizes = st.integers(0, 5)
    seldom = st.sampled_from((False, False, False, True))
    residents = [
        EvictionCandidate(
            name=f"v{index}",
            tier=draw(st.sampled_from(TierName)),
            nbytes=draw(sizes),
            last_use=draw(st.integers(0, 4)),
            next_use=draw(st.sampled_from([0.0, 0.0, 1.0, 2.0])),
            spill_bytes=draw(st.one_of(st.none(), st.integers(0, 4))),
            in_use=draw(seldom),
            superseded=draw(seldom),
        )
        for index in range(draw(st.integers(0, 6)))
    ]
    rooms = []
    for tier in (HOST, NVME):
        # A version that is being written counts as used and is no candidate.
        used = total(residents, tier) + draw(sizes)
        rooms.append(TierUsage(used_bytes=used, bytes_max=used + draw(st.integers(0, 6))))
    return residents, rooms[0], rooms[1]


def total(residents: list[EvictionCandidate], tier: TierName) -> int:
    return sum(resident.nbytes for resident in residents if resident.tier == tier)


def free_after(node: Node, drop: set[str], spill: set[str]) -> tuple[int, int]:
    """Free bytes in both tiers after the named versions are dropped or spilled."""
    residents, host, nvme = node
    dropped = [r for r in residents if r.name in drop]
    moved = sum(r.nbytes for r in residents if r.name in spill)
    written = sum(r.cost_bytes for r in residents if r.name in spill)
    return (
        host.bytes_max - host.used_bytes + total(dropped, HOST) + moved,
        nvme.bytes_max - nvme.used_bytes + total(dropped, NVME) - written,
    )


def is_possible(node: Node, needed: int, placement: EvictionPlan) -> bool:
    by_name = {resident.name: resident for resident in node[0]}
    drop, spill = set(placement.drop), set(placement.spill)
    host_free, nvme_free = free_after(node, drop, spill)
    return (
        not drop & spill
        and all(by_name[n].superseded and not by_name[n].in_use for n in drop)
        and all(by_name[n].tier == HOST and not by_name[n].in_use for n in spill)
        and nvme_free >= (needed if placement.tier == NVME else 0)
        and (placement.tier == NVME or host_free >= needed)
    )


def every_spill(node: Node, needed: int) -> list[set[str]]:
    """All sets of versions whose spilling frees enough of the host tier, after all possible
    drops."""
    residents = node[0]
    movable = [r.name for r in residents if r.tier == HOST and not r.in_use and not r.superseded]
    drop = {r.name for r in residents if r.superseded and not r.in_use}
    choices = chain.from_iterable(combinations(movable, n) for n in range(len(movable) + 1))
    found = []
    for choice in choices:
        host_free, nvme_free = free_after(node, drop, set(choice))
        if host_free >= needed and nvme_free >= 0:
            found.append(set(choice))
    return found


@given(nodes(), st.integers(1, 20))
def test_a_plan_is_feasible(node: Node, needed: int) -> None:
    placement = plan_eviction(needed, *node)
    if placement is not None:
        assert is_possible(node, needed, placement)


@given(nodes(), st.integers(1, 20))
def test_no_plan_means_that_no_choice_is_feasible(node: Node, needed: int) -> None:
    if plan_eviction(needed, *node) is not None:
        return
    drop = {r.name for r in node[0] if r.superseded and not r.in_use}
    assert free_after(node, drop, set())[1] < needed, "NVMe has space"
    assert not every_spill(node, needed), "eviction frees enough of the host tier"


@given(nodes(), st.integers(1, 20))
def test_the_host_tier_is_used_whenever_eviction_frees_enough(node: Node, needed: int) -> None:
    placement = plan_eviction(needed, *node)
    assert (placement is not None and placement.tier == HOST) == bool(every_spill(node, needed))


@given(nodes(), st.integers(1, 20), st.integers(1, 20))
def test_the_size_on_nvme_may_differ_from_the_size_in_host(
    node: Node, needed: int, nvme_needed: int
) -> None:
    placement = plan_eviction(needed, *node, nvme_needed)
    assert (placement is not None and placement.tier == HOST) == bool(every_spill(node, needed))
    drop = {r.name for r in node[0] if r.superseded and not r.in_use}
    fits = free_after(node, drop, set())[1] >= nvme_needed
    if placement is None:
        assert not fits
    elif placement.tier == NVME:
        assert free_after(node, set(placement.drop), set())[1] >= nvme_needed


@given(
    st.one_of(st.none(), st.floats(0, 100)),
    st.one_of(st.none(), st.floats(0, 100)),
    st.floats(0, 50),
    st.floats(0, 50),
)
def test_an_expected_use_is_never_past_and_keeps_the_lru_order(
    first: float | None, second: float | None, first_use: float, second_use: float
) -> None:
    now = 50.0
    uses = expected_use(first, first_use, now), expected_use(second, second_use, now)
    assert min(uses) >= now
    if first is not None and second is not None and now <= first <= second:
        assert uses[0] <= uses[1]
    if first is second is None and first_use <= second_use:
        assert uses[0] >= uses[1], "the least recently used is expected last"


@given(nodes(), st.integers(1, 20))
@example(
    (
        [
            EvictionCandidate(name="v0", tier=HOST, nbytes=4, last_use=0),
            EvictionCandidate(name="v1", tier=HOST, nbytes=6, last_use=1),
        ],
        TierUsage(used_bytes=10, bytes_max=10),
        TierUsage(used_bytes=0, bytes_max=10),
    ),
    6,
)
def test_no_version_is_evicted_needlessly(node: Node, needed: int) -> None:
    placement = plan_eviction(needed, *node)
    if placement is None or placement.tier == NVME:
        return
    host = node[1]
    if needed <= host.bytes_max - host.used_bytes:
        assert placement == EvictionPlan(tier=HOST)
    for name in placement.spill:
        host_free, _ = free_after(node, set(placement.drop), set(placement.spill) - {name})
        assert host_free < needed, f"{name} is spilled for nothing"
    if not placement.spill:
        for name in placement.drop:
            host_free, _ = free_after(node, set(placement.drop) - {name}, set())
            assert host_free < needed, f"{name} is dropped for nothing"


@given(nodes(), st.integers(1, 20))
@example(
    (
        [
            EvictionCandidate(name="v0", tier=HOST, nbytes=2, last_use=0),
            EvictionCandidate(name="v1", tier=HOST, nbytes=3, last_use=1),
        ],
        TierUsage(used_bytes=5, bytes_max=5),
        TierUsage(used_bytes=0, bytes_max=5),
    ),
    3,
)
def test_the_earliest_next_use_among_spilled_versions_is_as_late_as_possible(
    node: Node, needed: int
) -> None:
    residents, host, nvme = node
    roomy = TierUsage(used_bytes=nvme.used_bytes, bytes_max=nvme.bytes_max + total(residents, HOST))
    placement = plan_eviction(needed, residents, host, roomy)
    if placement is None or not placement.spill:
        return
    age = {r.name: (-r.next_use, r.last_use, r.name) for r in residents}
    newest = max(age[name] for name in placement.spill)
    choices = every_spill((residents, host, roomy), needed)
    assert newest == min(max(age[name] for name in choice) for choice in choices)


def test_the_latest_use_is_evicted_first_then_the_least_recent_one_then_the_first_name() -> None:
    def spilled(*residents: tuple[str, float, int]) -> tuple[str, ...]:
        candidates = [
            EvictionCandidate(name=name, tier=HOST, nbytes=4, next_use=next_use, last_use=last_use)
            for name, next_use, last_use in residents
        ]
        full = TierUsage(used_bytes=4 * len(candidates), bytes_max=4 * len(candidates))
        plan = plan_eviction(8, candidates, full, TierUsage(used_bytes=0, bytes_max=100))
        assert plan is not None
        return plan.spill

    assert spilled(("a", 1.0, 0), ("b", 3.0, 2), ("c", 2.0, 1)) == ("b", "c")
    assert spilled(("a", 1.0, 3), ("b", 1.0, 2), ("c", 1.0, 1)) == ("c", "b")
    assert spilled(("c", 1.0, 1), ("b", 1.0, 1), ("a", 1.0, 1)) == ("a", "b")
