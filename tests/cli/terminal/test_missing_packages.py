"""What needs packages that are not installed says so before it begins anything."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

METADATA = """Metadata-Version: 2.4
Name: plexrl
Version: 0.1.0
Requires-Dist: absent-one>=1; extra == "server"
Requires-Dist: absent-one>=1; extra == "worker"
Requires-Dist: absent-two; extra == "worker"
Requires-Dist: absent-three; extra == "demo"
"""
STATEMANAGER = (
    *("statemanager", "--node", "n", "--listen", "s", "--host-dir", "h", "--host-bytes", "1MiB"),
    *("--nvme-dir", "v", "--nvme-bytes", "1MiB"),
)


@pytest.mark.parametrize(
    ("command", "packages", "extras"),
    [
        (("demo",), "absent-one, absent-two, absent-three", "server,worker,demo"),
        (("demo", "--paced"), "absent-one, absent-two, absent-three", "server,worker,demo"),
        (
            ("up", "--virtual-gpus", "2", "--data-dir", "d"),
            "absent-one, absent-two",
            "server,worker",
        ),
        (
            ("node", "join", "tls://127.0.0.1:9", "--data-dir", "d"),
            "absent-one, absent-two",
            "worker",
        ),
        (STATEMANAGER, "absent-one, absent-two", "worker"),
    ],
)
def test_a_command_names_each_missing_package_once_and_begins_nothing(
    command: tuple[str, ...], packages: str, extras: str, tmp_path: Path
) -> None:
    record = tmp_path / "site" / "plexrl-0.1.0.dist-info"
    record.mkdir(parents=True)
    (record / "METADATA").write_text(METADATA)
    work = tmp_path / "work"
    work.mkdir()
    path = os.pathsep.join((str(tmp_path / "site"), str(Path(__file__).parents[3])))
    refused = subprocess.run(
        [sys.executable, "-m", "plexrl", *command],
        cwd=work,
        env={**os.environ, "PYTHONPATH": path, "PLEXRL_JOIN_TOKEN": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert refused.returncode == 1, refused.stderr
    assert f" needs {packages}, not installed here: " in refused.stderr
    assert f"pip install 'plexrl[{extras}]'" in refused.stderr
    assert not list(work.iterdir())


def test_a_package_that_cannot_be_imported_is_named_with_the_reason(tmp_path: Path) -> None:
    reason = "libssl.so.9: cannot open shared object file"
    (tmp_path / "httpx.py").write_text(f'raise ImportError("{reason}", name="httpx")')
    path = os.pathsep.join((str(tmp_path), *sys.path[1:]))
    refused = subprocess.run(
        [sys.executable, "-m", "plexrl", "jobs", "--url", "http://127.0.0.1:9"],
        env={**os.environ, "PYTHONPATH": path, "PLEXRL_API_KEY": "k"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert refused.returncode == 1
    assert f"needs httpx, which cannot be imported here ({reason})" in refused.stderr
    assert "Traceback" not in refused.stderr
