"""What a worker answers whose backend is not installed on its node."""

import sys
from pathlib import Path

import pytest

from plexrl.errors import InvalidRequestError
from plexrl.model.deployment_spec import DeploymentSpec
from plexrl.model.spec import tiny_qwen2
from plexrl.worker.process.backend_factory import make_backend


def test_a_missing_megatron_is_refused_with_the_line_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "megatron", None)
    spec = DeploymentSpec(
        model=tiny_qwen2("0123456789"), kind="train", backend="megatron", workers=1
    )
    with pytest.raises(InvalidRequestError, match=r"pip install 'plexrl\[megatron\]'"):
        make_backend(spec, 0, 1, tmp_path)
