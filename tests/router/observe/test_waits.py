"""Estimated waits in Prometheus's text."""

from plexrl.router.observe.metrics import WaitCollector, metrics_text
from plexrl.scheduler.queries.eta import eta_quality
from plexrl.scheduler.state.records import RATIO_BOUNDS, EtaErrors


def test_starts_outside_their_interval_and_the_ratios_are_published() -> None:
    errors = EtaErrors(count=9, slipped=1, early=1, late=2, ratio_sum=12.5)
    errors.ratios[RATIO_BOUNDS.index(1.1)] = 8
    errors.ratios[-1] = 1
    lines = metrics_text(WaitCollector(eta_quality(errors))).decode().splitlines()
    for line in (
        'plexrl_wait_starts_total{start="early"} 1.0',
        'plexrl_wait_starts_total{start="inside"} 6.0',
        'plexrl_wait_starts_total{start="late"} 2.0',
        "plexrl_wait_slips_total 1.0",
        'plexrl_wait_ratio_bucket{le="0.9"} 0.0',
        'plexrl_wait_ratio_bucket{le="8.0"} 8.0',
        'plexrl_wait_ratio_bucket{le="+Inf"} 9.0',
        "plexrl_wait_ratio_count 9.0",
        "plexrl_wait_ratio_sum 12.5",
    ):
        assert line in lines
