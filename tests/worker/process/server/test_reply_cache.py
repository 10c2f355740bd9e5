"""A worker's reply cache: every run once, none out of order, none for an earlier lock holder."""

from typing import Any

import pytest

from plexrl.errors import ConflictError, StaleTokenError
from plexrl.wire.messages import RunName
from plexrl.wire.operations import OperationKind
from plexrl.worker.process.server import reply_cache
from plexrl.worker.process.server.reply_cache import KEPT_MAX, KeptReply, ReplyCache
from tests.wire.runs import make_run


def command(
    kind: str = "optim_step",
    seq: int = 1,
    name: RunName = ("o", 1),
    *,
    replay: bool = False,
) -> Any:
    return make_run(OperationKind(kind), operation=name[0], token=name[1], seq=seq, replay=replay)


def test_a_known_run_is_answered_and_not_run_again() -> None:
    replies = ReplyCache()
    assert replies.begin(command())
    assert replies.known(("o", 1))
    assert replies.answer(("o", 1)) is None
    reply = KeptReply({"reply": "finished"}, b"")
    replies.end(("o", 1), reply)
    assert replies.answer(("o", 1)) is reply


def test_a_stale_token_is_refused() -> None:
    replies = ReplyCache()
    replies.begin(command("barrier", name=("a", 5)))
    with pytest.raises(StaleTokenError, match="token 4 is stale"):
        replies.begin(command("barrier", name=("b", 4)))


def test_a_mutation_already_applied_is_not_applied_again() -> None:
    replies = ReplyCache()
    replies.applied_seq = 3
    assert not replies.begin(command(seq=3))


def test_a_mutation_that_skips_one_is_refused_unless_it_overwrites_everything() -> None:
    replies = ReplyCache()
    with pytest.raises(ConflictError, match="mutation 2 came before mutation 1"):
        replies.begin(command(seq=2))
    assert replies.begin(command("sync_weights", seq=2, name=("s", 1), replay=True))


def test_answers_are_kept_within_a_bound() -> None:
    replies = ReplyCache()
    for index in range(KEPT_MAX + 10):
        replies.begin(command("barrier", name=(f"o{index}", 1)))
        replies.end((f"o{index}", 1), KeptReply({}, b""))
    assert not replies.known(("o0", 1))
    assert replies.known((f"o{KEPT_MAX + 9}", 1))


def test_large_answers_are_kept_within_a_bound_of_bytes_and_the_newest_always(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reply_cache, "KEPT_BYTES_MAX", 100)
    monkeypatch.setattr(reply_cache, "KEPT_MIN", 3)
    replies = ReplyCache()

    def known(*sizes: int) -> list[bool]:
        names = [(f"o{len(sizes)}-{index}", 1) for index in range(len(sizes))]
        for name, size in zip(names, sizes, strict=True):
            replies.begin(command("barrier", name=name))
            replies.end(name, KeptReply({}, bytes(size)))
        return [replies.known(name) for name in names]

    assert known(60, 10, 10, 10, 10) == [True] * 5
    assert known(10, 10, 10, 10, 50, 10) == [True] * 6
    assert known(70, 80, 90, 1) == [False, True, True, True]
