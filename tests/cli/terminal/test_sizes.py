"""Sizes in options: with a unit, or GiB."""

import pytest
import typer

from plexrl.cli.terminal.sizes import byte_size, memory_size


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("80", 80 << 30), ("0.125", 128 << 20), ("80GiB", 80 << 30), ("512 MiB", 512 << 20)],
)
def test_memory_is_given_in_gib_or_with_a_unit(text: str, nbytes: int) -> None:
    assert memory_size(text) == nbytes


def test_other_sizes_without_a_unit_are_bytes() -> None:
    assert byte_size("4096") == 4096


@pytest.mark.parametrize("text", ["", "much", "-1", "1.2.3", "80 GB!", "nan"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        memory_size(text)
