"""The wheel and the source archive: what they hold, and what runs in clean environments."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
VERSIONS = ("3.11", "3.12", "3.13")
TORCH = "torch==2.13.0"
WHEEL_BYTES_MAX = 4 << 20
START_S = 240
SDK = """
import sys, plexrl
names = [getattr(plexrl, name) for name in plexrl.__all__]
assert plexrl.tiny_qwen2("0123456789=", seed=1) is not None
heavy = {"torch", "transformers", "fastapi", "sqlalchemy", "uvicorn"} & set(sys.modules)
assert not heavy, heavy
print(len(names), "names")
"""
COMPLETION = """
eval "$(plexrl --show-completion)"
COMP_WORDS=(plexrl sta) COMP_CWORD=1
_plexrl_completion plexrl
echo "${COMPREPLY[@]}"
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


def run(command: list[str], folder: Path, **variables: str) -> str:
    """What a command prints, which ends well. Nothing of this checkout is on its path."""
    hidden = ("PYTHONPATH", "PLEXRL_URL", "PLEXRL_API_KEY")
    inherited = {name: value for name, value in os.environ.items() if name not in hidden}
    ended = subprocess.run(
        command,
        cwd=folder,
        env={**inherited, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-4000:]
    return ended.stdout


def environment(version: str, folder: Path) -> Path:
    """The programs of a new environment with this Python."""
    python = shutil.which(f"python{version}")
    if python is None or subprocess.run([python, "-c", ""], check=False).returncode != 0:
        pytest.skip(f"no python{version} on PATH")
    run([python, "-m", "venv", str(folder)], folder.parent)
    return folder / "bin"


def install(programs: Path, *packages: str) -> None:
    run([str(programs / "python"), "-m", "pip", "install", "--quiet", *packages], programs)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel, which is built from the source archive alone, and that archive."""
    folder = tmp_path_factory.mktemp("built")
    run([sys.executable, "-m", "venv", str(folder / "venv")], folder)
    install(folder / "venv" / "bin", "build")
    python = str(folder / "venv" / "bin" / "python")
    run([python, "-m", "build", "--outdir", str(folder / "dist"), str(ROOT)], folder)
    (wheel,), (archive,) = (folder / "dist").glob("*.whl"), (folder / "dist").glob("*.tar.gz")
    return wheel, archive


def tracked(*folders: str) -> set[str]:
    command = ["git", "ls-files", *folders]
    return set(run(command, ROOT).splitlines())


def test_the_wheel_holds_the_package_with_its_data_and_the_examples(
    built: tuple[Path, Path],
) -> None:
    wheel, _ = built
    names = set(zipfile.ZipFile(wheel).namelist())
    version = wheel.name.split("-")[1]
    data = f"plexrl-{version}.data/data/share/plexrl/"
    examples = {f"{data}{name}" for name in tracked("examples")}
    rest = {name for name in names if not name.startswith(f"plexrl-{version}.dist-info/")}
    assert rest == tracked("plexrl") | examples
    assert wheel.name.endswith("-py3-none-any.whl")
    assert wheel.stat().st_size < WHEEL_BYTES_MAX


def test_the_source_archive_holds_what_the_wheel_is_built_of_and_the_pages(
    built: tuple[Path, Path],
) -> None:
    with tarfile.open(built[1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    generated = {"PKG-INFO", "pyproject.toml", ".gitignore"}
    pages = {"README.md", "CHANGELOG.md", "LICENSE"}
    assert names == tracked("plexrl", "examples", "docs") | pages | generated


@pytest.mark.parametrize("version", VERSIONS)
def test_the_sdk_and_the_command_line_run_without_any_extra(
    version: str, built: tuple[Path, Path], tmp_path: Path
) -> None:
    programs = environment(version, tmp_path / "venv")
    install(programs, str(built[0]))
    path = f"{programs}:{os.environ['PATH']}"
    assert "names" in run([str(programs / "python"), "-c", SDK], tmp_path)
    assert re.fullmatch(
        r"plexrl \d+\.\d+\.\d+\n", run([str(programs / "plexrl"), "--version"], tmp_path)
    )
    run([str(programs / "plexrl"), "init", "starter"], tmp_path)
    assert (tmp_path / "starter" / "train.py").exists()
    completed = run(["bash", "-c", COMPLETION], tmp_path, PATH=path)
    assert {"status", "statemanager"} <= set(completed.split())
    for command, package, extras in (
        (("up", "--data-dir", "data"), "fastapi", "server,worker"),
        (("simulate", "published"), "sortedcontainers", "simulator"),
    ):
        refused = subprocess.run(
            [programs / "plexrl", *command],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (refused.returncode, package in refused.stderr) == (1, True), refused.stderr
        assert f"pip install 'plexrl[{extras}]'" in " ".join(refused.stderr.split())


def first_controller() -> str:
    """The README's first controller, with a few steps in place of all."""
    (code,) = re.findall(
        r"```python\n(import random.*?)```", (ROOT / "README.md").read_text(), re.S
    )
    shortened = re.sub(r"STEPS, PROMPTS, SAMPLES = 150,", "STEPS, PROMPTS, SAMPLES = 3,", code)
    assert shortened != code
    return str(shortened)


@pytest.fixture
def cluster(built: tuple[Path, Path], tmp_path: Path) -> Iterator[str]:
    """URL and key of `plexrl up` from the wheel."""
    programs = environment("3.11", tmp_path / "cluster")
    install(programs, TORCH)
    install(programs, f"{built[0]}[server,worker]")
    up = subprocess.Popen(
        [programs / "plexrl", "up", "--data-dir", "data", "--virtual-gpus", "2", "--json"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert up.stdout is not None
    with up.stdout:
        try:
            line = up.stdout.readline()
            assert line, "the cluster did not start"
            yield line
        finally:
            up.send_signal(signal.SIGINT)
            assert up.wait(START_S) == 0


def test_the_first_controller_of_the_readme_trains_on_a_cluster_of_the_wheel(
    built: tuple[Path, Path], cluster: str, tmp_path: Path
) -> None:
    endpoint = json.loads(cluster)
    programs = environment("3.11", tmp_path / "controller")
    install(programs, f"{built[0]}[text]")
    script = tmp_path / "first_controller.py"
    script.write_text(first_controller())
    shown = run(
        [str(programs / "python"), str(script)],
        tmp_path,
        PLEXRL_URL=endpoint["url"],
        PLEXRL_API_KEY=Path(endpoint["key_file"]).read_text().strip(),
    )
    assert "step 3/3" in shown
    assert "from_pretrained(" in shown
