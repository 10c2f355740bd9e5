"""A worker's memory: every run once, none out of order, none for a former holder."""

import pytest

from plexrl.errors import ConflictError, StaleTokenError
from plexrl.worker.process import replies as replies_module
from plexrl.worker.process.replies import KEPT_MAX, Replies, Reply


def command(
    kind: str = "optim_step", seq: int = 1, token: int = 1, **more: object
) -> dict[str, object]:
    return {"kind": kind, "seq": seq, "token": token, "replay": False, **more}


def test_a_known_run_is_answered_and_not_run_again() -> None:
    replies = Replies()
    assert replies.begin(("o", 1), command())
    assert replies.known(("o", 1))
    assert replies.answer(("o", 1)) is None
    reply = Reply({"reply": "finished"}, b"")
    replies.end(("o", 1), reply)
    assert replies.answer(("o", 1)) is reply


def test_a_stale_token_is_refused() -> None:
    replies = Replies()
    replies.begin(("a", 5), command("barrier", token=5))
    with pytest.raises(StaleTokenError, match="token 4 is stale"):
        replies.begin(("b", 4), command("barrier", token=4))


def test_a_mutation_already_applied_is_not_applied_again() -> None:
    replies = Replies()
    replies.applied_seq = 3
    assert not replies.begin(("o", 1), command(seq=3))


def test_a_mutation_that_skips_one_is_refused_unless_it_overwrites_everything() -> None:
    replies = Replies()
    with pytest.raises(ConflictError, match="mutation 2 came before mutation 1"):
        replies.begin(("o", 1), command(seq=2))
    assert replies.begin(("s", 1), command("sync_weights", seq=2, replay=True))


def test_answers_are_kept_within_a_bound() -> None:
    replies = Replies()
    for index in range(KEPT_MAX + 10):
        replies.begin((f"o{index}", 1), command("barrier"))
        replies.end((f"o{index}", 1), Reply({}, b""))
    assert not replies.known(("o0", 1))
    assert replies.known((f"o{KEPT_MAX + 9}", 1))


def test_large_answers_are_kept_within_a_bound_of_bytes_and_the_newest_always(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replies_module, "KEPT_BYTES_MAX", 100)
    monkeypatch.setattr(replies_module, "KEPT_MIN", 3)
    replies = Replies()

    def known(*sizes: int) -> list[bool]:
        names = [(f"o{index}", len(sizes)) for index in range(len(sizes))]
        for name, size in zip(names, sizes, strict=True):
            replies.begin(name, command("barrier"))
            replies.end(name, Reply({}, bytes(size)))
        return [replies.known(name) for name in names]

    assert known(60, 10, 10, 10, 10) == [True] * 5
    assert known(10, 10, 10, 10, 50, 10) == [True] * 6
    assert known(70, 80, 90, 1) == [False, True, True, True]
