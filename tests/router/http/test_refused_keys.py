"""Requests without a valid key are counted, limited for each network, and logged now and then."""

from contextlib import ExitStack

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plexrl.errors import OverloadedError
from plexrl.router.server.refused_keys import NETWORKS_MAX, QUIET_S, RefusedKeys
from tests.router.live_router import live_router

BURST = 7
PER_S = 0.5


@pytest.fixture
def keys() -> RefusedKeys:
    return RefusedKeys(burst=BURST, per_s=PER_S)


def is_limited(keys: RefusedKeys, network: str, now: float) -> bool:
    try:
        keys.check(network, now)
    except OverloadedError:
        return True
    return False


def test_a_network_may_err_in_a_burst_and_then_at_a_rate(keys: RefusedKeys) -> None:
    for _ in range(BURST):
        assert not is_limited(keys, "a", 0.0)
        keys.add("a", 0.0)
    assert is_limited(keys, "a", 0.0)
    assert not is_limited(keys, "b", 0.0), "another network is not concerned"
    assert is_limited(keys, "a", 0.5 / PER_S)
    assert not is_limited(keys, "a", 1 / PER_S)
    keys.add("a", 1 / PER_S)
    assert is_limited(keys, "a", 1 / PER_S)
    assert (keys.count, keys.limited_count) == (BURST + 1, 3)


@given(st.lists(st.floats(0, 3), max_size=200))
def test_at_most_burst_and_rate_are_answered(gaps: list[float]) -> None:
    keys, now = RefusedKeys(burst=BURST, per_s=PER_S), 0.0
    for gap in gaps:
        now += gap
        if not is_limited(keys, "a", now):
            keys.add("a", now)
        assert keys.count <= BURST + PER_S * now + 1e-6
    assert keys.count + keys.limited_count == len(gaps)


def test_the_networks_that_are_remembered_are_bounded(keys: RefusedKeys) -> None:
    for number in range(NETWORKS_MAX + 10):
        keys.add(str(number), 0.0)
    assert len(keys._spent) == NETWORKS_MAX


def test_a_report_is_due_once_a_minute_and_counts_all(keys: RefusedKeys) -> None:
    first = keys.add("a", 0.0)
    assert first is not None
    assert first.startswith("1 request")
    assert all(keys.add("a", at) is None for at in (1.0, 2.0, QUIET_S - 1))
    second = keys.add("b", QUIET_S)
    assert second is not None
    assert second.startswith("4 requests")
    assert "from b" in second


def test_a_flood_of_wrong_keys_gets_429_and_valid_keys_that_are_known_pass() -> None:
    with ExitStack() as stack:
        router = stack.enter_context(live_router(refused_keys_burst=3, refused_keys_per_s=0.001))
        operator = stack.enter_context(router.client())
        stranger = stack.enter_context(router.client("wrong"))
        assert operator.get("/v1/jobs").status_code == 200
        answers = [stranger.get("/v1/jobs") for _ in range(5)]
        statuses = [answer.status_code for answer in answers]
        assert statuses == [401] * 3 + [429] * 2
        assert int(answers[3].headers["retry-after"]) >= 900
        assert operator.get("/v1/jobs").status_code == 200
        metrics = httpx.get(f"{router.url}/v1/metrics").text
        log = router.log.read_text()
    assert f'plexrl_refused_keys_total{{status="401"}} {statuses.count(401)}.0' in metrics
    assert f'plexrl_refused_keys_total{{status="429"}} {statuses.count(429)}.0' in metrics
    assert log.count("without a valid API key") == 1
    assert "127.0.0.1" in log
    assert "wrong" not in log


@pytest.mark.parametrize("header", [{}, {"Authorization": "Basic x"}])
def test_requests_without_a_key_are_counted_too(header: dict[str, str]) -> None:
    with live_router() as router:
        assert httpx.get(f"{router.url}/v1/jobs", headers=header).status_code == 401
        text = httpx.get(f"{router.url}/v1/metrics").text
    assert 'plexrl_refused_keys_total{status="401"} 1.0' in text
