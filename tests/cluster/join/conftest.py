"""A head and a machine that may join it."""

from pathlib import Path

import pytest

from plexrl.cluster.join.certificate_files import CertificateFiles
from tests.cluster.join.head_service import Head


@pytest.fixture
def head(tmp_path: Path) -> Head:
    (tmp_path / "head").mkdir()
    return Head(tmp_path / "head")


@pytest.fixture
def machine(tmp_path: Path) -> CertificateFiles:
    return CertificateFiles(tmp_path / "machine")
