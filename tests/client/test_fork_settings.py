"""Settings of a fork, as its controller reads them."""

from typing import TYPE_CHECKING, cast

import pytest

from plexrl.client.blocking.job_reader import JobReader
from plexrl.errors import InvalidRequestError

if TYPE_CHECKING:
    from plexrl.client.calls.transport import Transport
    from plexrl.wire.messages.views import JobView


class Nowhere:
    """A transport that is not used."""

    location = None


def fork(settings: dict[str, str | float | bool]) -> JobReader:
    view = {"job": "j", "name": "n", "fork": {"job": "p", "step": 1, "settings": settings}}
    return JobReader(cast("Transport", Nowhere()), cast("JobView", view))


def test_a_whole_number_is_an_int_where_the_default_is_one() -> None:
    found = fork({"samples": 8.0}).setting("samples", 4)
    assert (found, type(found)) == (8, int)
    with pytest.raises(InvalidRequestError, match="samples"):
        fork({"samples": 8.5}).setting("samples", 4)


def test_another_type_is_refused() -> None:
    given = fork({"yes": True, "one": 1.0, "text": "x"})
    with pytest.raises(InvalidRequestError, match="yes"):
        given.setting("yes", 4)
    with pytest.raises(InvalidRequestError, match="one"):
        given.setting("one", default=True)
    with pytest.raises(InvalidRequestError, match="one"):
        given.setting("one", "x")
    with pytest.raises(InvalidRequestError, match="text"):
        given.setting("text", 1.0)
