"""`scripts/release.sh` refuses what is no release, before it makes anything."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

CHART = "deploy/helm/plexrl/Chart.yaml"
GIT = ("git", "-c", "user.name=a", "-c", "user.email=a@b")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A repository with the script, version 1.2.3 and its section in the changelog."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "release.sh", tmp_path / "scripts")
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "1.2.3"\n')
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## 1.2.3\n")
    (tmp_path / CHART).parent.mkdir(parents=True)
    (tmp_path / CHART).write_text("version: 1.2.3\nappVersion: 1.2.3\n")
    (tmp_path / "Makefile").write_text("lint test:\n\t@echo checked; false\n")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    commit(tmp_path)
    return tmp_path


def commit(folder: Path) -> None:
    subprocess.run(["git", "add", "-A"], cwd=folder, check=True)
    subprocess.run([*GIT, "commit", "-qm", "all"], cwd=folder, check=True)


def release(folder: Path, version: str) -> str:
    """What the script prints, which must fail."""
    words = ["scripts/release.sh", version]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert not (folder / "dist").exists()
    return done.stdout + done.stderr


def test_a_version_that_the_project_does_not_have_is_refused(clone: Path) -> None:
    assert "another version" in release(clone, "1.2.4")


def test_a_chart_of_another_version_is_refused(clone: Path) -> None:
    (clone / CHART).write_text("version: 1.2.3\nappVersion: 1.2.2\n")
    commit(clone)
    assert "another appVersion" in release(clone, "1.2.3")


def test_a_dot_of_a_version_is_a_dot(clone: Path) -> None:
    assert "another version" in release(clone, "1.2.")
    assert "another version" in release(clone, "1.2..")


def test_a_version_without_a_section_of_the_changelog_is_refused(clone: Path) -> None:
    (clone / "CHANGELOG.md").write_text("# Changelog\n\n## Unreleased\n")
    commit(clone)
    assert "no section" in release(clone, "1.2.3")


def test_changes_that_are_not_committed_are_refused(clone: Path) -> None:
    (clone / "new.py").touch()
    assert "has changes" in release(clone, "1.2.3")


def test_a_version_that_was_released_is_refused(clone: Path) -> None:
    subprocess.run([*GIT, "tag", "v1.2.3"], cwd=clone, check=True)
    assert "is there" in release(clone, "1.2.3")


def test_nothing_is_built_before_the_checks_pass(clone: Path) -> None:
    assert "checked" in release(clone, "1.2.3")
