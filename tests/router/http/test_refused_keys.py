"""Requests without a valid key are counted, limited for each network, and logged now and then."""

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plexrl.errors import OverloadedError
from plexrl.router.server.refused_keys import BURST, NETWORKS_MAX, QUIET_S, RATE, RefusedKeys
from tests.router.live_router import live_router


def is_limited(keys: RefusedKeys, network: str, now: float) -> bool:
    try:
        keys.check(network, now)
    except OverloadedError:
        return True
    return False


def test_a_network_may_err_in_a_burst_and_then_at_a_rate() -> None:
    keys = RefusedKeys()
    for _ in range(int(BURST)):
        assert not is_limited(keys, "a", 0.0)
        keys.add("a", 0.0)
    assert is_limited(keys, "a", 0.0)
    assert not is_limited(keys, "b", 0.0), "another network is not concerned"
    assert is_limited(keys, "a", 0.5 / RATE)
    assert not is_limited(keys, "a", 1 / RATE)
    keys.add("a", 1 / RATE)
    assert is_limited(keys, "a", 1 / RATE)
    assert (keys.count, keys.limited_count) == (BURST + 1, 3)


@given(st.lists(st.floats(0, 3), max_size=200))
def test_at_most_burst_and_rate_are_answered(gaps: list[float]) -> None:
    keys, now = RefusedKeys(), 0.0
    for gap in gaps:
        now += gap
        if not is_limited(keys, "a", now):
            keys.add("a", now)
        assert keys.count <= BURST + RATE * now + 1e-6
    assert keys.count + keys.limited_count == len(gaps)


def test_the_networks_that_are_remembered_are_bounded() -> None:
    keys = RefusedKeys()
    for number in range(NETWORKS_MAX + 10):
        keys.add(str(number), 0.0)
    assert len(keys._spent) == NETWORKS_MAX


def test_a_report_is_due_once_a_minute_and_counts_all() -> None:
    keys = RefusedKeys()
    first = keys.add("a", 0.0)
    assert first is not None
    assert first.startswith("1 request")
    assert all(keys.add("a", at) is None for at in (1.0, 2.0, QUIET_S - 1))
    second = keys.add("b", QUIET_S)
    assert second is not None
    assert second.startswith("4 requests")
    assert "from b" in second


def test_a_flood_of_wrong_keys_gets_429_and_valid_keys_that_are_known_pass() -> None:
    with live_router() as router, router.client() as operator, router.client("wrong") as stranger:
        assert operator.get("/v1/jobs").status_code == 200
        answers = [stranger.get("/v1/jobs") for _ in range(int(BURST) + 10)]
        statuses = [answer.status_code for answer in answers]
        assert statuses[: int(BURST)] == [401] * int(BURST)
        assert 429 in statuses
        assert int(answers[statuses.index(429)].headers["retry-after"]) >= 1
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
