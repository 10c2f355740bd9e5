"""Mapped memory by address."""

import os
from collections.abc import Iterator

import pytest

from plexrl.statemanager.bytes.mapped_memory import FileMapping, discard, equal, populate

PAGE = 4096


@pytest.fixture
def memory() -> Iterator[tuple[int, FileMapping]]:
    """Four pages in a memory file, each filled with its number."""
    fd = os.memfd_create("test", os.MFD_CLOEXEC)
    os.ftruncate(fd, 4 * PAGE)
    mapped = FileMapping(fd, 4 * PAGE)
    for page in range(4):
        mapped.view[page * PAGE : (page + 1) * PAGE] = bytes([page]) * PAGE
    yield fd, mapped
    mapped.close()
    os.close(fd)


def test_populated_pages_keep_their_contents(memory: tuple[int, FileMapping]) -> None:
    fd, mapped = memory
    discard(mapped.address + PAGE, PAGE)
    assert os.fstat(fd).st_blocks * 512 == 3 * PAGE
    assert mapped.view[PAGE : 2 * PAGE] == bytes(PAGE)
    populate(mapped.address, 4 * PAGE)
    assert os.fstat(fd).st_blocks * 512 == 4 * PAGE
    assert mapped.view[2 * PAGE :] == b"\2" * PAGE + b"\3" * PAGE


def test_memory_is_compared_byte_for_byte(memory: tuple[int, FileMapping]) -> None:
    _, mapped = memory
    mapped.view[:PAGE] = mapped.view[PAGE : 2 * PAGE]
    assert equal(mapped.address, mapped.address + PAGE, PAGE)
    mapped.view[PAGE - 1] ^= 1
    assert not equal(mapped.address, mapped.address + PAGE, PAGE)
    assert equal(mapped.address, mapped.address + PAGE, PAGE - 1)
