"""The table of waiting units holds what a plain dict holds, in rows that stay while units leave."""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from plexrl.ids import DeploymentId, TenantId
from plexrl.scheduler.placement.waiting.unit_table import ROWS_MIN, UnitTable
from plexrl.scheduler.placement.waiting.units import (
    EquivalenceClass,
    Head,
    Member,
    Size,
    Unit,
    UnitOwner,
)
from tests.examples import examples


def unit(number: int, random: Random) -> Unit:
    name = DeploymentId(f"d{number}")
    owner = UnitOwner(TenantId(random.choice("tuv")), random.randint(-1, 1))
    size = Size(random.choice(("", "x")), random.randint(1, 3), random.random() < 0.5)
    state_bytes = random.randint(0, 2)
    equivalence = EquivalenceClass(owner, 64.0, 100.0, ((state_bytes, None, None),), None)
    head = Head(float(number), number, name, 0.5, state_bytes)
    return Unit(head, (size,), equivalence, (Member(float(number), number, name, size),))


def check(table: UnitTable, expected: dict[DeploymentId, Unit]) -> None:
    assert len(table) == len(expected) == int(table.is_used.sum())
    for name, each in expected.items():
        row = table.row(name)
        assert table.units[row] == each
        assert table.serial[row] == each.head.serial
        assert table.priority[row] == each.equivalence.owner.priority
        assert table.tenants.values[table.tenant[row]] == each.equivalence.owner.tenant
        assert table.all_sizes.values[table.sizes[row]] == each.sizes
        assert table.kinds.values[table.kind[row]] == (each.sizes, each.equivalence)
    assert set(table.all_sizes.in_use()) == {each.sizes for each in expected.values()}
    assert set(table.tenants.in_use()) == {
        each.equivalence.owner.tenant for each in expected.values()
    }


@settings(max_examples=examples(40), deadline=None)
@given(st.randoms(use_true_random=False), st.lists(st.integers(-3, 4), max_size=60))
def test_a_table_holds_the_units_that_entered_and_did_not_leave(
    random: Random, steps: list[int]
) -> None:
    table = UnitTable()
    expected: dict[DeploymentId, Unit] = {}
    number = 0
    for step in steps:
        for _ in range(abs(step) * 5):
            if step > 0:
                number += 1
                added = unit(number, random)
                expected[added.head.name] = added
                table.add(added)
            elif expected:
                name = random.choice(sorted(expected))
                rows = {other: table.row(other) for other in expected if other != name}
                del expected[name]
                table.remove(name)
                assert {other: table.row(other) for other in expected} == rows
        check(table, expected)


def test_a_table_shrinks_after_a_backlog_is_gone() -> None:
    table, random = UnitTable(), Random(1)
    for number in range(1000):
        table.add(unit(number, random))
    for number in range(1000):
        table.remove(DeploymentId(f"d{number}"))
    table.add(unit(1000, random))
    assert len(table.units) <= 2 * ROWS_MIN
    check(table, {DeploymentId("d1000"): unit_of(table)})


def test_a_table_that_grows_or_shrinks_has_rows_for_as_many_units_again() -> None:
    table, random = UnitTable(), Random(1)
    sizes = set()
    for number in range(8 * ROWS_MIN):
        table.add(unit(number, random))
        if len(table.units) not in sizes:
            sizes.add(len(table.units))
            # A row of a column costs little, and each growth copies all of them.
            assert (
                2 * len(table) - 1 <= max(ROWS_MIN, len(table.units)) <= 2 * len(table) + ROWS_MIN
            )
    assert len(sizes) <= 5


def unit_of(table: UnitTable) -> Unit:
    (found,) = [each for each in table.units if each is not None]
    return found
