"""The lines of `plexrl events`."""

import json
from typing import Any

import msgspec

from plexrl.cli.cluster.observe.events import Lines
from plexrl.ids import JobId
from plexrl.scheduler.state.messages import events as ev
from tests.scheduler.fake_cluster import FakeCluster


def test_each_state_of_a_job_is_shown_once_and_times_do_not_go_back() -> None:
    cluster = FakeCluster(policy="pack")
    records, lines = cluster.core.records(1e6), Lines()
    messages: list[dict[str, Any]] = []
    shown: list[str] = []

    def look() -> None:
        for topic, record in records.look(cluster.now):
            if topic.startswith("jobs/"):
                messages.append(json.loads(msgspec.json.encode(record)))
                line = lines.line(topic, messages[-1])
                shown.extend([] if line is None else [line])

    cluster.start_node(4)
    cluster.job("j")
    look()
    cluster.deploy("j/a")
    look()
    cluster.pass_time(1.0)
    cluster.deploy("j/b")
    look()
    cluster.submit("j:1", "j/a", "barrier")
    look()
    cluster.settle()
    look()
    cluster.send(ev.JobFinished(job=JobId("j"), outcome="completed"))
    look()
    states = [each["state"] for each in messages]
    assert len(states) > len(set(states)), "no message repeats a state, so this tests nothing"
    begun = [line for line in shown if ": still " not in line]
    assert [
        line.partition("jobs/")[2].partition(": ")[2].partition(",")[0] for line in begun
    ] == list(dict.fromkeys(states))
    times = [line[:23].strip() for line in shown if line[:23].strip()]
    assert times == sorted(times)
    assert len(shown) == len(set(shown))


def test_a_new_reason_or_holder_is_shown_without_the_old_time() -> None:
    lines = Lines()
    ready = {"state": "ready", "since": 1.0, "why": ""}
    assert lines.line("nodes/n", ready) is not None
    assert lines.line("nodes/n", {**ready, "gpus": 8}) is None
    drained = lines.line("nodes/n", {**ready, "why": "an operator drains it"})
    assert drained is not None
    assert drained.strip() == "nodes/n: still ready, an operator drains it"
    assert lines.line("nodes/n", ready) == f"{'':23}  nodes/n: still ready"
    assert lines.line("nodes/n", None) == f"{'':23}  nodes/n: removed"
    again = lines.line("nodes/n", ready)
    assert again is not None
    assert "still" not in again
