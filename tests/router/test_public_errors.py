"""Tenants are not told where the cluster keeps its journal and its files."""

import pytest

from plexrl import errors
from plexrl.router.public_errors import public_error

SECRET = "postgresql://plexrl@db.internal/journal"


@pytest.mark.parametrize(
    "kind",
    [
        errors.StorageError,
        errors.JournalFullError,
        errors.LeaseLostError,
        errors.LeaseHeldError,
        errors.StorageFullError,
    ],
)
def test_an_error_of_the_clusters_storage_keeps_its_class_and_loses_its_places(
    kind: type[errors.PlexRLError],
) -> None:
    told = public_error(kind(f"{SECRET} is full", path=SECRET, holder="host7", retry_after_s=2.0))
    assert type(told) is kind
    assert told.details == {"retry_after_s": 2.0}
    for secret in (SECRET, "host7"):
        assert secret not in str(told.to_wire())


def test_other_errors_are_told_as_they_are() -> None:
    for error in (
        errors.StateLostError("the state of 'j/actor' is lost"),
        errors.InvalidRequestError("no"),
        errors.UnavailableError("the scheduler is restarting"),
    ):
        assert public_error(error) is error
