"""The private fields of FSDP2 that we use, and the releases of torch that have them."""

import pytest
import torch

from plexrl.errors import InvalidRequestError
from plexrl.worker.training.fsdp.sharded_parameter import TESTED_RELEASES, check_torch


def test_this_release_of_torch_is_among_the_tested_ones() -> None:
    release = ".".join(torch.__version__.split(".")[:2])
    assert release in TESTED_RELEASES, (
        f"run tests/worker/training with torch {release}; if FSDP2's private fields in "
        "plexrl/worker/training/fsdp/sharded_parameter.py still are what they were, add it there "
        "and to pyproject.toml"
    )
    check_torch()


@pytest.mark.parametrize("version", ["2.10.0", "2.14.0+cu130", "3.0.0a0+git1"])
def test_another_release_is_refused_with_what_to_install(version: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"tested with torch 2\.11"):
        check_torch(version)
