"""One sandbox with small limits for all tests of programs in one."""

from collections.abc import Iterator

import pytest

from plexrl.errors import SandboxError
from plexrl.process.sandbox.limits import MIB, Limits
from plexrl.process.sandbox.sandbox import Sandbox

LIMITS = Limits(memory_bytes=256 * MIB, processes=32, tmp_bytes=8 * MIB, output_bytes=MIB)


@pytest.fixture(scope="session")
def sandbox() -> Iterator[Sandbox]:
    """A sandbox with small limits; tests are skipped where no sandbox works."""
    try:
        made = Sandbox(limits=LIMITS, at_once=4)
    except SandboxError as error:
        pytest.skip(f"no sandbox: {error}")
    with made:
        yield made
