"""Free GPUs are chosen close together, of one kind, and never on a closed node."""

import re
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from plexrl.scheduler.placement.capacity.node_pool import NodeKind, NodePool
from plexrl.wire.messages import RankPlacement
from tests.examples import examples

SMALL = NodeKind("a", 40)
LARGE = NodeKind("a", 80)
OTHER = NodeKind("b", 80)


def pool_of(*nodes: tuple[str, str, int], kind: NodeKind = SMALL) -> NodePool:
    """Nodes of (name, block, free GPUs), all of one kind."""
    pool = NodePool()
    for name, block, gpus in nodes:
        pool.add(name, kind, block, gpus, ())
    return pool


def nodes_of(found: tuple[RankPlacement, ...] | None) -> list[str]:
    assert found is not None
    return sorted({gpu.node for gpu in found})


def test_the_node_with_the_best_fit_is_used() -> None:
    pool = pool_of(("n1", "x", 8), ("n2", "x", 4), ("n3", "x", 3))
    assert nodes_of(pool.find(3, "", 0)) == ["n3"]
    assert nodes_of(pool.find(4, "", 0)) == ["n2"]
    assert nodes_of(pool.find(5, "", 0)) == ["n1"]


def test_one_node_comes_before_a_whole_block() -> None:
    pool = pool_of(("n1", "x", 2), ("n2", "x", 2), ("n3", "y", 7))
    assert nodes_of(pool.find(4, "", 0)) == ["n3"]


def test_the_shortest_run_of_neighbours_in_one_block_comes_before_several_blocks() -> None:
    pool = pool_of(
        *(("n1", "x", 3), ("n2", "x", 1), ("n3", "x", 3), ("n4", "x", 3)),
        *(("m1", "y", 3), ("m2", "z", 3)),
    )
    assert nodes_of(pool.find(6, "", 0)) == ["n3", "n4"]
    assert nodes_of(pool.find(7, "", 0)) == ["n1", "n2", "n3"]
    assert nodes_of(pool.find(8, "", 0)) == ["n1", "n2", "n3", "n4"]


def test_the_block_with_the_best_fit_is_used() -> None:
    pool = pool_of(("n1", "x", 2), ("n2", "x", 2), ("n3", "x", 2), ("m1", "y", 2), ("m2", "y", 2))
    assert nodes_of(pool.find(3, "", 0)) == ["m1", "m2"]


def test_the_fewest_adjacent_blocks_are_used_if_no_block_suffices() -> None:
    pool = pool_of(("n1", "u", 4), ("n2", "v", 1), ("n3", "w", 4), ("n4", "x", 3), ("n5", "y", 4))
    assert nodes_of(pool.find(7, "", 0)) == ["n3", "n4"]
    assert nodes_of(pool.find(9, "", 0)) == ["n1", "n2", "n3"]


def test_a_group_is_of_one_kind_with_the_least_memory_that_suffices() -> None:
    pool = NodePool()
    pool.add("s", SMALL, "", 4, ())
    pool.add("l", LARGE, "", 4, ())
    pool.add("o", OTHER, "", 4, ())
    assert nodes_of(pool.find(2, "", 0)) == ["s"]
    assert nodes_of(pool.find(2, "", 41)) == ["l"]
    assert nodes_of(pool.find(2, "b", 0)) == ["o"]
    assert pool.find(5, "", 0) is None, "two kinds never form one group"
    assert pool.find(1, "b", 81) is None
    assert pool.find(1, "c", 0) is None


def test_a_closed_node_gives_nothing_until_it_is_added_again() -> None:
    pool = pool_of(("n1", "x", 4), ("n2", "x", 4))
    pool.close("n1")
    assert nodes_of(pool.find(2, "", 0)) == ["n2"]
    assert pool.find(5, "", 0) is None
    assert pool.free_gpus() == 4
    pool.remove("n1")
    pool.add("n1", SMALL, "x", 4, ())
    assert pool.free_gpus() == 8
    assert nodes_of(pool.find(5, "", 0)) == ["n1", "n2"]


def test_gpus_that_a_node_no_longer_has_are_not_freed() -> None:
    pool = pool_of(("n1", "x", 4))
    held = pool.find(4, "", 0)
    assert held is not None
    pool.take(held)
    pool.remove("n1")
    pool.add("n1", SMALL, "x", 2, range(4))
    pool.give_back(held)
    assert pool.snapshot() == {"n1": (True, (0, 1))}


def natural(block: str) -> list[list[str]]:
    """Equal to `natural_order` for the labels of these tests: numbers of less than five digits."""
    return [
        ["".join(c if not c.isdigit() else "" for c in part), re.sub(r"\D", "", part).zfill(5)]
        for part in block.split("/")
    ]


def test_blocks_of_one_row_come_before_blocks_of_two_rows() -> None:
    pool = pool_of(
        *(("n1", "row1/rack9", 2), ("n2", "row2/rack1", 3), ("n3", "row2/rack2", 1)),
        *(("n4", "row2/rack3", 2), ("n5", "row1/rack10", 1), ("n6", "row3/rack1", 2)),
    )
    assert nodes_of(pool.find(4, "", 0)) == ["n2", "n3"], "not n1 and n2, which are adjacent"
    assert nodes_of(pool.find(6, "", 0)) == ["n2", "n3", "n4"]
    assert nodes_of(pool.find(7, "", 0)) == ["n1", "n2", "n3", "n5"], "no row suffices"


def test_the_row_with_the_best_fit_is_used() -> None:
    pool = pool_of(
        *(("n1", "row1/rack1", 2), ("n2", "row1/rack2", 2), ("n3", "row1/rack3", 2)),
        *(("n4", "row2/rack1", 2), ("n5", "row2/rack2", 2)),
    )
    assert nodes_of(pool.find(4, "", 0)) == ["n4", "n5"]


def test_a_number_in_a_label_counts_as_a_number() -> None:
    pool = pool_of(("n1", "rack1", 2), ("n2", "rack10", 2), ("n3", "rack2", 2))
    assert nodes_of(pool.find(4, "", 0)) == ["n1", "n3"]


class Oracle:
    """An exhaustive search with the same rules over plain lists."""

    def __init__(self) -> None:
        self.nodes: dict[str, tuple[NodeKind, str]] = {}
        self.free: dict[str, set[int]] = {}
        self.closed: set[str] = set()

    def find(self, count: int, node_type: str, memory: int) -> list[str] | None:
        """The chosen nodes; None if there are too few GPUs."""
        kinds = {kind for kind, _ in self.nodes.values()}
        for kind in sorted(kinds, key=lambda k: (k.gpu_memory_bytes, k.node_type)):
            if node_type not in ("", kind.node_type) or kind.gpu_memory_bytes < memory:
                continue
            names = sorted(n for n in self.nodes if self.nodes[n][0] == kind)
            names = [n for n in names if n not in self.closed]
            if sum(len(self.free[n]) for n in names) >= count:
                return self._among(names, count)
        return None

    def _among(self, names: list[str], count: int) -> list[str]:
        whole = [(len(self.free[n]), n) for n in names if len(self.free[n]) >= count]
        if whole:
            return [min(whole)[1]]
        blocks: dict[str, list[str]] = {}
        for name in sorted(names, key=lambda n: (self.nodes[n][1], n)):
            blocks.setdefault(self.nodes[name][1], []).append(name)
        rooms = [(self._room(inside), block) for block, inside in blocks.items()]
        enough = [each for each in rooms if each[0] >= count]
        if enough:
            return self._shortest(blocks[min(enough)[1]], count)
        order = self._narrowest_part(blocks, count)
        spans = [
            (high - low, low, [n for block in order[low : high + 1] for n in blocks[block]])
            for low in range(len(order))
            for high in range(low, len(order))
        ]
        return min(span for span in spans if self._room(span[2]) >= count)[2]

    def _narrowest_part(self, blocks: dict[str, list[str]], count: int) -> list[str]:
        """The blocks of the part with the longest label that has enough room, in natural order."""
        paths = {block: block.split("/") for block in blocks}
        parts = {tuple(path[:depth]) for path in paths.values() for depth in range(len(path) + 1)}
        found = []
        for part in parts:
            inside = [block for block, path in paths.items() if tuple(path[: len(part)]) == part]
            room = self._room([name for block in inside for name in blocks[block]])
            if room >= count:
                inside.sort(key=natural)
                # The root holds all: its room decides nothing.
                found.append((-len(part), room if part else 0, natural(inside[0]), inside))
        return min(found)[3]

    def _shortest(self, names: list[str], count: int) -> list[str]:
        runs = [
            (high - low, low, names[low : high + 1])
            for low in range(len(names))
            for high in range(low, len(names))
        ]
        return min(run for run in runs if self._room(run[2]) >= count)[2]

    def _room(self, names: list[str]) -> int:
        return sum(len(self.free[name]) for name in names)


BLOCKS = ("", "x", "y", "r1/a2", "r1/a10", "r2/a1", "r2/b/c1", "r2/b/c2")

steps = st.lists(
    st.one_of(
        st.tuples(
            st.just("find"),
            st.integers(1, 9),
            st.sampled_from(("", "a", "b")),
            st.sampled_from((0, 80)),
        ),
        st.tuples(st.just("give"), st.integers(0, 9)),
        st.tuples(st.sampled_from(("close", "again")), st.integers(0, 5)),
    ),
    max_size=30,
)
nodes = st.lists(
    st.tuples(st.sampled_from((SMALL, LARGE, OTHER)), st.sampled_from(BLOCKS), st.integers(1, 4)),
    min_size=1,
    max_size=6,
)


@settings(max_examples=examples(400), deadline=None)
@given(nodes, steps)
def test_any_history_finds_what_an_exhaustive_search_finds(
    members: list[tuple[NodeKind, str, int]], history: list[tuple[object, ...]]
) -> None:
    pool, oracle = NodePool(), Oracle()
    sizes = [gpus for _, _, gpus in members]
    for index, (kind, block, gpus) in enumerate(members):
        name = f"n{index}"
        pool.add(name, kind, block, gpus, ())
        oracle.nodes[name], oracle.free[name] = (kind, block), set(range(gpus))
    before = pool.snapshot()
    held: list[tuple[RankPlacement, ...]] = []
    for step, *arguments in history:
        number = arguments[0]
        assert isinstance(number, int)
        name = f"n{number % len(members)}"
        if step == "find":
            _, node_type, memory = arguments
            assert isinstance(node_type, str)
            assert isinstance(memory, int)
            found = pool.find(number, node_type, memory)
            wanted = oracle.find(number, node_type, memory)
            assert (found is None) == (wanted is None)
            if found is None or wanted is None:
                continue
            assert [gpu.rank for gpu in found] == list(range(number))
            assert {gpu.node for gpu in found} <= set(wanted)
            if len({oracle.nodes[n][1] for n in wanted}) == 1:
                assert {gpu.node for gpu in found} == {n for n in wanted if oracle.free[n]}
            pool.take(found)
            held.append(found)
            for gpu in found:
                oracle.free[gpu.node].remove(gpu.gpu)
        elif step == "give" and held:
            given_back = held.pop(number % len(held))
            pool.give_back(given_back)
            for gpu in given_back:
                oracle.free[gpu.node].add(gpu.gpu)
        elif step == "close":
            pool.close(name)
            oracle.closed.add(name)
        elif step == "again":
            at = number % len(members)
            pool.remove(name)
            taken = set(range(sizes[at])) - oracle.free[name]
            pool.add(name, members[at][0], members[at][1], sizes[at], taken)
            oracle.closed.discard(name)
        now = {n: (n not in oracle.closed, tuple(sorted(f))) for n, f in oracle.free.items()}
        assert pool.snapshot() == now
    for each in held:
        pool.give_back(each)
    for index, (kind, block, gpus) in enumerate(members):
        pool.remove(f"n{index}")
        pool.add(f"n{index}", kind, block, gpus, ())
    assert pool.snapshot() == before


def test_consecutive_ranks_share_a_node_if_possible() -> None:
    pool = pool_of(("n1", "x", 2), ("n2", "x", 2), ("n3", "x", 2))
    found = pool.find(6, "", 0)
    assert found is not None
    changes = sum(one.node != other.node for one, other in pairwise(found))
    assert changes == 2
