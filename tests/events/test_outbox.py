"""The bounded queue of messages."""

import asyncio

from plexrl.events.outbox import EventOutbox, Message


def named(*names: str) -> list[Message]:
    return [Message(name, b"x") for name in names]


def test_the_oldest_are_dropped_and_counted() -> None:
    outbox = EventOutbox(2)
    for message in named("a", "b", "c", "d"):
        outbox.put(message)
    assert (len(outbox), outbox.dropped, outbox.is_incomplete) == (2, 2, True)
    assert outbox.take(10) == named("c", "d")
    assert outbox.take(10) == []


def test_what_was_not_sent_comes_first_again_as_far_as_there_is_room() -> None:
    outbox = EventOutbox(3)
    for message in named("a", "b", "c"):
        outbox.put(message)
    unsent = outbox.take(2)
    outbox.put(named("d")[0])
    outbox.put_back(unsent)
    assert (outbox.dropped, outbox.is_incomplete) == (1, True)
    assert outbox.take(10) == named("b", "c", "d")


def test_a_sender_waits_for_the_next_message() -> None:
    async def wait() -> None:
        outbox = EventOutbox(2)
        waiting = asyncio.create_task(outbox.wait())
        await asyncio.sleep(0)
        assert not waiting.done()
        outbox.put(named("a")[0])
        await waiting
        outbox.put_back(outbox.take(1))
        await outbox.wait()
        assert outbox.take(1) == named("a")
        assert outbox.dropped == 0

    asyncio.run(wait())
