"""The checks of fault runs find what they are there for."""

import pytest

from tests.hosts.evidence import Edge, History, Start, check_one_holder, check_operations

GROUPS: dict[Start, str] = {("a/x", 1): "g1", ("a/x", 2): "g1", ("b/y", 1): "g1", ("c/z", 1): "g2"}


def edge(at: float, who: str, edge: str, token: int, rank: int = 0) -> Edge:
    deployment, _, incarnation = who.partition(":")
    return Edge(
        at, deployment, rank, int(incarnation), edge == "begin", f"o{token}", token, "a log"
    )


def test_holders_one_after_the_other_are_fine() -> None:
    edges = [
        *(edge(1, "a/x:1", "begin", 1), edge(1.1, "a/x:1", "begin", 1, rank=1)),
        *(edge(2, "a/x:1", "end", 1), edge(2.1, "a/x:1", "end", 1, rank=1)),
        *(edge(3, "b/y:1", "begin", 2), edge(4, "b/y:1", "end", 2)),
        edge(4, "c/z:1", "begin", 1),
    ]
    check_one_holder(edges, GROUPS)


def test_a_killed_holder_does_not_hold_for_ever() -> None:
    killed = edge(1, "a/x:1", "begin", 1)
    check_one_holder([killed, edge(3, "b/y:1", "begin", 2), edge(4, "b/y:1", "end", 2)], GROUPS)


def test_two_deployments_at_once_are_found() -> None:
    edges = [
        *(edge(1, "a/x:1", "begin", 1), edge(2, "b/y:1", "begin", 2)),
        *(edge(3, "a/x:1", "end", 1), edge(3, "b/y:1", "end", 2)),
    ]
    with pytest.raises(AssertionError, match="b/y rank 0 incarnation 1 begins"):
        check_one_holder(edges, GROUPS)


def test_an_old_token_is_found() -> None:
    edges = [
        *(edge(1, "a/x:1", "begin", 3), edge(2, "a/x:1", "end", 3)),
        *(edge(3, "b/y:1", "begin", 2), edge(4, "b/y:1", "end", 2)),
    ]
    with pytest.raises(AssertionError, match="with token 2"):
        check_one_holder(edges, GROUPS)


def test_a_process_that_was_replaced_and_acts_still_is_found() -> None:
    edges = [
        *(edge(1, "a/x:2", "begin", 1), edge(2, "a/x:2", "end", 1)),
        edge(3, "a/x:1", "begin", 1),
    ]
    with pytest.raises(AssertionError, match="incarnation 1 begins"):
        check_one_holder(edges, GROUPS)


def test_lost_and_doubled_operations_are_found() -> None:
    check_operations(History(submitted={"o1"}, finished={"o1": 1, "load": 1}))
    check_operations(History(submitted={"o1", "o2"}, finished={"o1": 1}, cancelled={"o2"}))
    with pytest.raises(AssertionError, match="1 accepted operations were lost"):
        check_operations(History(submitted={"o1", "o2"}, finished={"o1": 1}))
    with pytest.raises(AssertionError, match="completed twice"):
        check_operations(History(submitted={"o1"}, finished={"o1": 2}))
    with pytest.raises(AssertionError, match="run again"):
        check_operations(History(submitted={"o1"}, finished={"o1": 1}, repeated=["o1"]))
