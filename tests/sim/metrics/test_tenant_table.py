"""Sums per tenant stay bounded and complete."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plexrl.sim.metrics.tenant_table import OTHERS, TENANTS_MAX, JainIndex, TenantTable


@given(values=st.lists(st.floats(0.01, 1e6), min_size=1, max_size=50))
def test_fairness_lies_between_one_who_has_all_and_all_alike(values: list[float]) -> None:
    index = JainIndex()
    index.add(values)
    assert 1 / len(values) - 1e-9 <= index.value <= 1 + 1e-9
    alike = JainIndex()
    alike.add(values[:1] * len(values))
    assert alike.value == pytest.approx(1.0)


def test_jains_index_of_two_who_have_one_and_three() -> None:
    index = JainIndex()
    index.add([1.0, 3.0])
    assert index.value == pytest.approx(16 / 20)


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
    assert table.fairness() == pytest.approx(1.5**2 / 2.5)


def test_a_tenant_with_a_job_under_way_is_never_joined() -> None:
    table = TenantTable()
    kept = table.of("small")
    kept.live = 1
    for number in range(4 * TENANTS_MAX):
        table.of(f"{number}").gpu_s += 1.0
    assert table.of("small") is kept
