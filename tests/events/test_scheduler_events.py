"""Events of a real scheduler process at a real Mosquitto."""

import asyncio
import json
import signal
from contextlib import closing
from functools import partial
from pathlib import Path

from plexrl.scheduler.service.journal.sql_journal import SqlJournal
from tests.events.mosquitto import Mosquitto, Subscriber
from tests.events.scheduler import A, Workers, scheduler, workers
from tests.scheduler.live_service import OPERATOR, deployment_of

JOB = "plexrl/jobs/a/j"
LONG_S = 3600.0
"""A lease that does not run out on a busy machine."""


def test_a_subscriber_sees_the_whole_life_of_a_job(tmp_path: Path, broker: Mosquitto) -> None:
    async def live(listen: str) -> None:
        async with workers(listen, "n") as at_work:
            await events.until(lambda: events.states("plexrl/nodes/n") == ["ready"])
            await at_work.router.call("submit_job", {**_job("j"), "tenant": "a"})
            await events.until(lambda: events.states(JOB) == ["QUEUED"])
            await _create(at_work, "j")
            await events.until(lambda: "ADMITTED" in events.states(JOB))
            await at_work.barrier("j", "o1")
            await events.until(lambda: events.states(JOB)[-1] == "PROFILING")
            (group,) = [topic for topic, *_ in events.messages if "/groups/" in topic][:1]
            await events.until(lambda: events.state(group)["holder"] == "j/actor")
            await at_work.finish("j")
            await events.until(lambda: events.state(JOB)["state"] == "COMPLETED")
            # The group went with its last member.
            await events.until(lambda: events.messages[-1][:2] == (group, None) or _gone(group))

    def _gone(group: str) -> bool:
        return events.state(group) is None

    with Subscriber(broker.port) as events, scheduler(tmp_path, broker.url) as running:
        asyncio.run(live(running.listen))
    assert events.states(JOB) == ["QUEUED", "ADMITTED", "PROFILING", "COMPLETED"]
    ended = events.state(JOB)
    assert ended["tenant"] == "a"
    assert ended["submitted_at"] < ended["since"] == ended["ended_at"]
    assert ended["deployments"][0]["state"] == "stopped"
    times = [payload["since"] for topic, payload, _ in events.messages if topic == JOB]
    assert times == sorted(times)


def test_a_late_subscriber_gets_the_present_states(tmp_path: Path, broker: Mosquitto) -> None:
    async def live(listen: str) -> None:
        async with workers(listen, "n", "m") as at_work:
            await at_work.submit("j")
            await at_work.submit("k", tenant="b")
            await at_work.barrier("j", "o1")
            await early.until(lambda: early.states(JOB)[-1:] == ["PROFILING"])
            with Subscriber(broker.port) as late:
                # States go on changing; sooner or later both have heard the same.
                await late.until(lambda: len(late.present()) >= 6)
                await late.until(lambda: late.present() == early.present())
                found = late.present()
                assert next(retained for topic, _, retained in late.messages if topic == JOB)
            assert found.pop("plexrl/scheduler")["state"] == "online"
            assert found["plexrl/nodes/n"]["state"] == found["plexrl/nodes/m"]["state"] == "ready"
            assert found["plexrl/jobs/b/k"]["deployments"][0]["deployment"] == "k/actor"

    with Subscriber(broker.port) as early, scheduler(tmp_path, broker.url) as running:
        asyncio.run(live(running.listen))


def test_a_lost_and_a_drained_node_are_shown_with_the_reason(
    tmp_path: Path, broker: Mosquitto
) -> None:
    async def live(listen: str) -> None:
        async with workers(listen, "n", "m") as at_work:
            await events.until(lambda: events.states("plexrl/nodes/n") == ["ready"])
            await at_work.leave("n")
            await events.until(lambda: events.states("plexrl/nodes/n")[-1] == "lost")
            await at_work.router.call("drain_node", {**OPERATOR, "node": "m", "is_draining": True})
            await events.until(lambda: events.state("plexrl/nodes/m")["draining"])

    with Subscriber(broker.port) as events, scheduler(tmp_path, broker.url) as running:
        asyncio.run(live(running.listen))
    assert events.state("plexrl/nodes/n")["why"] == "the connection to its agent ended"
    assert events.state("plexrl/nodes/m")["why"] == "an operator drains it"
    assert events.state("plexrl/nodes/m")["state"] == "ready"


def test_the_last_will_of_a_killed_scheduler_and_its_goodbye(
    tmp_path: Path, broker: Mosquitto
) -> None:
    with Subscriber(broker.port) as events:
        with scheduler(tmp_path, broker.url) as running:
            events.wait_state("plexrl/scheduler", "online")
            running.send(signal.SIGKILL)
            lost = events.wait_state("plexrl/scheduler", "offline")
            assert lost["why"] == "its connection to the broker was lost"
        with scheduler(tmp_path, broker.url) as running:
            online = events.wait_state("plexrl/scheduler", "online")
            assert online["holder"] == "s"
            running.send(signal.SIGTERM)
            assert running.wait_end() == 0
            assert events.wait_state("plexrl/scheduler", "offline")["why"] == (
                "the scheduler was stopped"
            )


def test_a_restarted_scheduler_removes_stale_states_and_knows_since_when_the_others_hold(
    tmp_path: Path, broker: Mosquitto
) -> None:
    async def begin(listen: str) -> None:
        async with workers(listen, "n") as at_work:
            await at_work.submit("j")
            await at_work.barrier("j", "o1")
            await events.until(lambda: events.states(JOB)[-1:] == ["PROFILING"])

    async def resume(listen: str) -> None:
        async with workers(listen, "n"):
            for stale in ("plexrl/jobs/a/gone", "plexrl/nodes/strange"):
                await events.until(partial(events.messages.__contains__, (stale, None, False)))
            await events.until(lambda: events.states("plexrl/nodes/n")[-1] == "ready")
            with Subscriber(broker.port) as late:
                await late.until(lambda: late.state(JOB) is not None)
                await late.until(lambda: late.state("plexrl/scheduler") is not None)
                assert not {"plexrl/jobs/a/gone", "plexrl/nodes/strange"} & late.topics()
                # Its workers are gone, but its state is what it was.
                known = late.state(JOB)
                assert (known["state"], known["since"]) == (before["state"], before["since"])

    with Subscriber(broker.port) as events:
        with scheduler(tmp_path, broker.url) as running:
            asyncio.run(begin(running.listen))
            running.send(signal.SIGKILL)
            events.wait_state("plexrl/scheduler", "offline")
        before = events.state(JOB)
        assert before["since"] is not None
        forged = json.dumps({**before, "job": "gone"})
        events.publish("plexrl/jobs/a/gone", forged, retain=True)
        events.publish("plexrl/nodes/strange", "no JSON {", retain=True)
        with scheduler(tmp_path, broker.url) as running:
            asyncio.run(resume(running.listen))


def test_the_states_come_back_whole_after_the_broker_lost_them(
    tmp_path: Path, broker: Mosquitto
) -> None:
    async def live(listen: str) -> None:
        async with workers(listen, "n") as at_work:
            await at_work.submit("j")
            with Subscriber(broker.port) as events:
                await events.until(lambda: events.state(JOB) is not None)
            broker.kill()
            # Without a broker the cluster works on.
            await at_work.submit("k")
            assert (await at_work.barrier("j", "o1"))["state"] == "finished"
            await at_work.finish("k")
            broker.start()
            with Subscriber(broker.port) as again:
                await again.until(lambda: again.state("plexrl/jobs/a/k") is not None)
                await again.until(lambda: again.states("plexrl/jobs/a/k")[-1] == "COMPLETED")
                await again.until(lambda: again.state(JOB) is not None)
                await again.until(lambda: again.states(JOB)[-1] == "PROFILING")
                await again.until(lambda: again.state("plexrl/nodes/n") is not None)

    with scheduler(tmp_path, broker.url) as running:
        asyncio.run(live(running.listen))


def test_a_broker_that_stops_answering_delays_nothing_and_costs_the_oldest_messages(
    tmp_path: Path, broker: Mosquitto
) -> None:
    async def live(listen: str) -> None:
        async with workers(listen, "n") as at_work:
            await at_work.submit("j")
            await events.until(lambda: events.state(JOB) is not None)
            broker.send(signal.SIGSTOP)
            # More messages than the queue holds, all accepted while the broker does nothing.
            for index in range(60):
                await at_work.router.call("submit_job", {**_job(f"x{index}"), "tenant": "a"})
                await at_work.barrier("j", f"o{index}")
                status = await at_work.router.call("status", OPERATOR)
            while not (status := await _events(at_work))["dropped"]:
                pass
            assert status["queued"] <= 20
            broker.send(signal.SIGCONT)
            last = [f"plexrl/jobs/a/x{index}" for index in range(60)]
            await events.until(lambda: all(events.state(topic) is not None for topic in last))
            await events.until(lambda: events.state("plexrl/scheduler")["dropped"] > 0)

    with (
        Subscriber(broker.port) as events,
        scheduler(tmp_path, broker.url, queue_max=20, interval_s=0.01, timeout_s=1.0) as running,
    ):
        asyncio.run(live(running.listen))


def test_the_broker_is_taken_over_with_the_lead(tmp_path: Path, broker: Mosquitto) -> None:
    # The lease is not renewed meanwhile: a stopped process could hold the journal's lock.
    with (
        Subscriber(broker.port) as events,
        scheduler(tmp_path, broker.url, "first", lease_s=LONG_S) as first,
    ):
        events.wait_state("plexrl/scheduler", "online")
        with scheduler(tmp_path, broker.url, "second", waits=False, lease_s=LONG_S) as second:
            asyncio.run(second.wait_log("standing by"))
            first.send(signal.SIGSTOP)
            with closing(SqlJournal(str(tmp_path / "journal.sqlite"))) as journal:
                # The first one's lease, as if its time were over.
                journal.acquire("first", -1.0)
            second.wait_ready()
            events.wait(lambda: events.state("plexrl/scheduler")["holder"] == "second")
            first.send(signal.SIGCONT)
            asyncio.run(first.wait_log("another scheduler leads"))
            asyncio.run(second.submit_job("j"))
            events.wait(lambda: events.state("plexrl/jobs/operator/j") is not None)
            now = events.state("plexrl/scheduler")
            assert (now["holder"], now["state"]) == ("second", "online")


def test_a_prefetch_is_announced(tmp_path: Path, broker: Mosquitto) -> None:
    async def live(listen: str) -> None:
        async with workers(listen, "n", gpus=1) as at_work:
            for job in ("j", "k"):
                # Both do not fit into the node's host memory.
                await at_work.submit(job, state_bytes=700 << 20)

            async def step(job: str, index: int) -> None:
                await at_work.barrier(job, f"{job}-f{index}", kind="forward_backward")
                await at_work.barrier(job, f"{job}-o{index}", kind="optim_step")

            # They take turns; while one works, the other waits.
            for index in range(4):
                await asyncio.gather(step("j", index), step("k", index))
            await events.until(lambda: "plexrl/prefetch/n" in events.topics())

    with Subscriber(broker.port) as events, scheduler(tmp_path, broker.url) as running:
        asyncio.run(live(running.listen))
    topic, hint, was_retained = next(each for each in events.messages if "/prefetch/" in each[0])
    assert (topic, was_retained) == ("plexrl/prefetch/n", False)
    assert hint["node"] == "n"
    assert hint["deployment"] in ("j/actor", "k/actor")
    assert hint["seq"] > 0


async def _events(at_work: Workers) -> dict[str, int]:
    status = await at_work.router.call("status", OPERATOR)
    found: dict[str, int] = status["events"]
    return found


def _job(name: str) -> dict[str, object]:
    return {"job": name, "name": name, "controller_timeout_s": 1e6, "reattach_timeout_s": 1e6}


async def _create(at_work: Workers, job: str) -> None:
    await at_work.router.call("create_deployment", deployment_of(A, job))
