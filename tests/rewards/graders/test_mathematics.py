"""Mathematical answers, compared in the sandbox."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from plexrl.errors import DeadlineExceededError, InvalidRequestError, SandboxError
from plexrl.process.sandbox.limits import MIB, Limits
from plexrl.process.sandbox.sandbox import Sandbox
from plexrl.rewards.grade import Outcome
from plexrl.rewards.graders.mathematics import WORKER_CPU_S, MathGrader


@pytest.fixture(scope="module")
def grader(sandbox: Sandbox) -> Iterator[MathGrader]:
    del sandbox
    with MathGrader(at_once=2, timeout_s=1.0) as made:
        yield made


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("The result is \\boxed{\\frac{1}{2}}.", "0.5"),
        ("so we get $x = 3$", "3"),
        ("\\boxed{\\{1, 2\\}}", "\\{2, 1\\}"),
        ("\\boxed{(x+1)^2}", "x^2 + 2x + 1"),
        ("the answer is 3/4", "\\frac{3}{4}"),
    ],
)
def test_equal_answers_pass(grader: MathGrader, answer: str, expected: str) -> None:
    assert grader.grade(answer, expected).outcome is Outcome.PASSED


def test_other_answers_are_wrong(grader: MathGrader) -> None:
    found = grader.grade("\\boxed{\\frac{1}{3}}", "0.5")
    assert (found.score, found.outcome) == (0.0, Outcome.WRONG)
    assert "1/3 is not 1/2" in found.detail
    assert grader.grade("I do not know", "0.5").detail == (
        "the answer has no mathematical expression"
    )
    assert grader.grade("x" * (1 << 21), "0.5").outcome is Outcome.WRONG


def test_expected_answer_must_be_an_expression(grader: MathGrader) -> None:
    with pytest.raises(InvalidRequestError, match="no mathematical expression"):
        grader.grade("1", " ")


@pytest.mark.parametrize(
    "answer",
    [
        "\\boxed{9^{9^{9^{9}}}}",
        pytest.param("\\boxed{2^{2^{2^{2^{2^{2}}}}}}", marks=pytest.mark.slow),
        pytest.param("\\boxed{(10^9)!}", marks=pytest.mark.slow),
    ],
)
def test_bomb_is_a_failure_of_the_grader_and_harms_no_other_answer(
    grader: MathGrader, answer: str
) -> None:
    with ThreadPoolExecutor(4) as threads:
        bomb = threads.submit(grader.grade, answer, "1")
        others = [threads.submit(grader.grade, f"\\boxed{{{i}}}", "3") for i in range(6)]
        assert [each.result().score for each in others] == [0, 0, 0, 1, 0, 0]
        # Too long, or too much memory: not a grade.
        with pytest.raises((DeadlineExceededError, SandboxError)):
            bomb.result()
    assert grader.grade("\\boxed{3}", "3").score == 1.0


def test_program_in_an_answer_does_not_run(grader: MathGrader) -> None:
    text = "__import__('os').system('touch /tmp/x')"
    for answer in (text, f"\\boxed{{{text}}}", f"${text}$"):
        assert grader.grade(answer, "0").score == 0.0


@pytest.mark.usefixtures("sandbox")
def test_processes_live_longer_than_the_cpu_time_of_a_program() -> None:
    with MathGrader(at_once=1, limits=Limits(memory_bytes=1024 * MIB, cpu_s=1)) as grader:
        limits = grader._sandbox.limits
        assert (limits.memory_bytes, limits.cpu_s) == (1024 * MIB, WORKER_CPU_S)
        assert grader.grade("1", "1").score == 1.0


@pytest.mark.usefixtures("sandbox")
def test_grader_that_is_closed_during_a_comparison_leaves_no_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grader = MathGrader(at_once=1)
    opened = []

    class FakeSession:
        def __init__(self) -> None:
            self.is_closed = False
            opened.append(self)

        def ask(self, request: bytes, timeout_s: float) -> bytes:
            del timeout_s
            # Another thread may close the grader meanwhile.
            grader.close()
            return json.dumps({"id": json.loads(request)["id"], "difference": None}).encode()

        def close(self) -> None:
            self.is_closed = True

    monkeypatch.setattr(grader._sandbox, "open_session", lambda _: FakeSession())
    assert grader.grade("1", "1").score == 1.0
    assert [each.is_closed for each in opened] == [True]
    with pytest.raises(SandboxError, match="the grader is closed"):
        grader.grade("1", "1")
