"""What jobs wait beside what they accept, in Prometheus's text."""

from plexrl.router.observe.metrics import ServiceLevelCollector, metrics_text

JOBS = [
    {"job": "j1", "tenant": "t", "name": "calm", "slo": 0.3, "waiting_part": 0.3},
    {"job": "j2", "tenant": "u", "name": "late", "slo": 0.05, "waiting_part": 0.25},
    {"job": "j3", "tenant": "t", "name": "new", "slo": 0.3, "waiting_part": None},
]


def test_a_reader_without_a_key_sees_numbers_of_jobs_and_no_name() -> None:
    text = metrics_text(ServiceLevelCollector(JOBS, [])).decode()
    assert "plexrl_slo_jobs 2.0" in text.splitlines()
    assert "plexrl_slo_jobs_over 1.0" in text.splitlines()
    assert not any(job["name"] in text for job in JOBS)  # type: ignore[operator]


def test_each_visible_job_has_its_bound_and_what_it_waited() -> None:
    own = [job for job in JOBS if job["tenant"] == "t"]
    lines = metrics_text(ServiceLevelCollector(JOBS, own)).decode().splitlines()
    assert 'plexrl_job_slo{job="j1",name="calm",tenant="t"} 0.3' in lines
    assert 'plexrl_job_waiting_part{job="j1",name="calm",tenant="t"} 0.3' in lines
    assert 'plexrl_job_slo{job="j3",name="new",tenant="t"} 0.3' in lines
    assert not any("waiting_part{" in line and "new" in line for line in lines)
    assert not any("late" in line for line in lines)
