"""The task that keeps the connection to a broker."""

import asyncio

from plexrl.events.broker import Broker
from plexrl.events.config import BrokerConfig
from plexrl.events.outbox import EventOutbox
from plexrl.events.records import SchedulerRecord
from tests.free_ports import free_port

ONLINE = SchedulerRecord(state="online", since=0.0, why="", holder="one", version="1")


def test_a_cancellation_that_wait_for_loses_ends_the_task_though_the_broker_is_away() -> None:
    async def main() -> None:
        asked = asyncio.Event()
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def may_publish() -> None:
            asked.set()
            # As aiomqtt does. Python 3.11 returns the result and drops the cancellation.
            await asyncio.wait_for(answer, 60)  # noqa: TID251

        config = BrokerConfig(url=f"mqtt://127.0.0.1:{free_port()}")
        broker = Broker(config, EventOutbox(10), lambda _: (), may_publish, ONLINE)
        running = asyncio.create_task(broker.run())
        await asked.wait()
        await asyncio.sleep(0)
        answer.set_result(None)
        running.cancel()
        # To await it under a time limit would cancel it once more.
        await asyncio.wait({running}, timeout=60)
        assert running.cancelled()

    asyncio.run(main())
