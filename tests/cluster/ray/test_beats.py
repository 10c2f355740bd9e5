"""A node's actor that gives no sign of life is given up, also if it never answered a beat."""

import asyncio
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from plexrl.cluster.ray.nodes import _NodeActor
from plexrl.process.children.restart_log import PartRecord, read_parts


class Method:
    """A method of an actor; `answer` is what its calls return."""

    def __init__(self) -> None:
        self.answer: Future[None] = Future()

    def remote(self) -> "Method":
        return self

    def future(self) -> "Future[None]":
        return self.answer


class StoppedActor:
    """An actor that answers nothing."""

    def __init__(self) -> None:
        self.serve, self.beat = Method(), Method()


def actor_of_node(actor: StoppedActor, stuck_s: float) -> _NodeActor:
    made = object.__new__(_NodeActor)
    made._options = cast("Any", SimpleNamespace(part_stuck_s=stuck_s))
    made._node = cast("Any", SimpleNamespace(node="n"))
    made._actor, made._started = cast("Any", actor), True
    return made


def reason_of_its_end(actor: StoppedActor, record: PartRecord, stuck_s: float) -> str:
    async def ended() -> str:
        async with asyncio.timeout(60):
            return await actor_of_node(actor, stuck_s).ended(record)

    return asyncio.run(ended())


def test_an_actor_that_never_beats_is_given_up(tmp_path: Path) -> None:
    record = PartRecord(tmp_path / "parts")
    assert "no sign of life" in reason_of_its_end(StoppedActor(), record, stuck_s=0.5)


def test_a_silent_actor_that_ends_counts_as_silent_no_longer(tmp_path: Path) -> None:
    actor, path = StoppedActor(), tmp_path / "parts"
    record = PartRecord(path)
    record.silent("n", 20.0)
    actor.serve.answer.set_result(None)
    assert reason_of_its_end(actor, record, stuck_s=60.0) == "its actor returned"
    assert read_parts(path)["n"].stuck_since is None
