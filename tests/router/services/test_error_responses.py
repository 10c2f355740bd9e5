"""Tenants do not see where the cluster keeps its journal and its files."""

import pytest

from plexrl import errors
from plexrl.access import AccessRole
from plexrl.router.http.routes.operations import held_reason
from plexrl.router.services.authentication import Caller
from plexrl.router.services.error_responses import public_error

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
def test_a_storage_error_keeps_its_class_without_locations(
    kind: type[errors.PlexRLError],
) -> None:
    shown = public_error(kind(f"{SECRET} is full", path=SECRET, holder="host7", retry_after_s=2.0))
    assert type(shown) is kind
    assert shown.details == {"retry_after_s": 2.0}
    for secret in (SECRET, "host7"):
        assert secret not in str(shown.to_wire())


def test_other_errors_are_unchanged() -> None:
    for error in (
        errors.StateLostError("the state of 'j/actor' is lost"),
        errors.InvalidRequestError("no"),
        errors.UnavailableError("the scheduler is restarting"),
    ):
        assert public_error(error) is error


def test_only_the_operator_sees_which_disk_is_full() -> None:
    held = f"the disk of {SECRET} is full"
    assert SECRET in held_reason(held, Caller("operator", AccessRole.OPERATOR))
    shown = held_reason(held, Caller("t", AccessRole.MEMBER))
    assert "waits for the cluster's storage" in shown
    assert SECRET not in shown
