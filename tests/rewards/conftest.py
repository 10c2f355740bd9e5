"""Fixtures of the tests of rewards."""

from tests.sandboxes import sandbox

__all__ = ["sandbox"]
