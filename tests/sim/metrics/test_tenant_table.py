"""Sums per tenant stay bounded and complete."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plexrl.sim.metrics.tenant_table import OTHERS, TENANTS_MAX, TenantTable


def table_of(slowdowns: dict[str, list[float]]) -> TenantTable:
    table = TenantTable()
    for name, values in slowdowns.items():
        tenant = table.of(name)
        tenant.completed += len(values)
        tenant.slowdown += sum(values)
    return table


SLOWDOWNS = st.dictionaries(
    st.sampled_from("abcdef"), st.lists(st.floats(1.0, 1e6), min_size=1, max_size=5), min_size=1
)


@given(SLOWDOWNS, st.data())
def test_no_tenants_gain_makes_the_worst_tenant_worse(
    before: dict[str, list[float]], data: st.DataObject
) -> None:
    """Where every job is served as soon as before or sooner, the figure is no greater."""
    after = {
        name: [data.draw(st.floats(1.0, value)) for value in values]
        for name, values in before.items()
    }
    assert table_of(after).worst() <= table_of(before).worst() * (1 + 1e-12)
    assert table_of(before).worst() >= 1.0


def test_a_gain_that_only_some_tenants_have_is_no_loss() -> None:
    """Jain's index would fall from 1 to 0.55."""
    assert table_of({"a": [10.0], "b": [10.0]}).worst() == 10.0
    assert table_of({"a": [1.0], "b": [9.0]}).worst() == 9.0
    assert TenantTable().worst() == 1.0


def test_with_very_many_tenants_the_busiest_are_told_and_the_rest_together() -> None:
    table = TenantTable()
    count = 5 * TENANTS_MAX
    for number in range(count):
        tenant = table.of(f"tenant{number:05}")
        tenant.gpu_s += 3600.0 * (number + 1)
        tenant.ended += 1
        tenant.completed += 1
        tenant.slowdown += 1.0 + number % 2
    assert len(table._tenants) <= 2 * TENANTS_MAX
    results = table.results()
    assert len(results) == TENANTS_MAX + 1
    assert results[-1].tenant == OTHERS
    assert results[-2].tenant == f"tenant{count - 1:05}"
    assert sum(each.jobs for each in results) == count
    assert sum(each.gpu_hours for each in results) == pytest.approx(count * (count + 1) / 2)
    assert table.worst() == 2.0


def test_a_tenant_with_a_job_under_way_is_never_joined() -> None:
    table = TenantTable()
    kept = table.of("small")
    kept.live = 1
    for number in range(4 * TENANTS_MAX):
        table.of(f"{number}").gpu_s += 1.0
    assert table.of("small") is kept
