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


@pytest.mark.parametrize(("value", "default"), [(True, 4), (1.0, True), (1.0, "x"), ("x", 1.0)])
def test_another_type_is_refused(value: str | float | bool, default: str | float | bool) -> None:
    with pytest.raises(InvalidRequestError, match="one"):
        fork({"one": value}).setting("one", default)
