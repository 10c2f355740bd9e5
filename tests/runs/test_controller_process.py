"""A controller's process: what it sees, and who sees its key."""

import time
from pathlib import Path

import psutil
import pytest

import plexrl
from plexrl.runs.controller_process import CA_FILE, ControllerProcess
from plexrl.runs.records import RunSpec

SCRIPT = f"""
import os, time
import plexrl
print(open({CA_FILE!r}).read(), os.environ["PLEXRL_API_KEY"])
print(os.path.exists({str(Path(plexrl.__file__).parent.parent / "pyproject.toml")!r}))
print(os.path.exists("/etc/hosts"), os.path.exists("/etc/passwd"), flush=True)
time.sleep(1)
"""


def test_a_controller_sees_its_authority_and_key_and_nobody_else_the_key(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("authority")
    spec = RunSpec(
        run="run-1", tenant="lab", script="a.py", files={"a.py": SCRIPT.encode()}, created_at=1.0
    )
    log = tmp_path / "log"
    secret = "plx-of-this-run"
    environment = {"PLEXRL_API_KEY": secret}
    process = ControllerProcess(spec, environment, log, ca=str(tmp_path / "ca.pem"))
    try:
        deadline = time.monotonic() + 60
        while process.exit_code() is None:
            assert time.monotonic() < deadline
            for each in psutil.process_iter(["cmdline"]):
                assert secret not in " ".join(each.info["cmdline"] or ())
            time.sleep(0.1)
    finally:
        process.kill()
    lines = log.read_text().replace("\x06", "").splitlines()
    assert lines == [f"authority {secret}", "False", "True False"]
    assert process.exit_code() == 0


@pytest.mark.parametrize("ca", ["", "absent"])
def test_a_controller_needs_no_authority(tmp_path: Path, ca: str) -> None:
    spec = RunSpec(run="run-1", tenant="lab", script="a", files={"a": b""}, created_at=1.0)
    if ca:
        with pytest.raises(OSError, match="absent"):
            ControllerProcess(spec, {}, tmp_path / "log", ca=str(tmp_path / ca))
        return
    process = ControllerProcess(spec, {}, tmp_path / "log")
    while process.exit_code() is None:
        time.sleep(0.1)
    process.kill()
    assert process.exit_code() == 0
