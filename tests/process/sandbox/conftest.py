"""Fixtures of the tests of the sandbox."""

from tests.sandboxes import sandbox

__all__ = ["sandbox"]
