"""Overviews that requests share."""

import asyncio

import pytest

from plexrl.access import AccessRole
from plexrl.errors import UnavailableError
from plexrl.router.observe import overview as ov
from plexrl.router.observe.overview import Overviews, RecentAnswers
from plexrl.router.services.authentication import Caller


def test_requests_share_an_answer_and_a_failure_is_not_kept_as_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ov, "FAILURE_S", 0.0)
    asked = 0

    async def ask() -> int:
        nonlocal asked
        asked += 1
        await asyncio.sleep(0)
        if asked == 1:
            raise UnavailableError("no scheduler")
        return asked

    async def check() -> None:
        answers = RecentAnswers[int](3600.0)
        failed = await asyncio.gather(
            *(answers.of("t", ask) for _ in range(3)), return_exceptions=True
        )
        assert [type(each) for each in failed] == [UnavailableError] * 3
        assert await asyncio.gather(*(answers.of("t", ask) for _ in range(3))) == [2, 2, 2]
        assert await answers.of("t", ask) == 2
        assert await answers.of("u", ask) == 3

    asyncio.run(check())


def test_figures_without_a_key_are_asked_for_once_in_a_while() -> None:
    class Link:
        asked = 0

        async def call(self, *_: object, **__: object) -> dict[str, int]:
            self.asked += 1
            return {"now": self.asked}

    async def check() -> None:
        link = Link()
        overviews = Overviews(link, None)  # type: ignore[arg-type]
        assert [(await overviews.of_all())["now"] for _ in range(5)] == [1] * 5
        levels = [dict(await overviews.service_levels()) for _ in range(5)]
        assert levels == [{"now": 2}] * 5
        operator = Caller("operator", AccessRole.OPERATOR)
        assert [(await overviews.shares(operator))["now"] for _ in range(2)] == [3, 3]

    asyncio.run(check())
