"""The command line starts with few imports, and says where its cluster is and what to type next."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import requires
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from plexrl.cli.app import PANELS, app
from plexrl.cli.cluster.observe.status import PROBLEMS_MAX, show_status
from plexrl.ids import DeploymentId
from plexrl.wire.messages.cluster_views import HeldView, StatusView
from tests.router.live_router import OPERATOR_KEY, LiveRouter, live_router

RUN = """
import json, sys
{code}
sys.stderr.write("\\n" + json.dumps(sorted(sys.modules)))
"""
COMMAND = """
from plexrl.cli.app import main
sys.argv = ["plexrl", *{words!r}]
try:
    main()
except SystemExit as ended:
    assert not ended.code, ended.code
"""
SERVERS = {"alembic", "fastapi", "sqlalchemy", "starlette", "uvicorn", "cryptography", "xxhash"}
COMPUTE = {"matplotlib", "pyarrow", "safetensors", "tokenizers", "torch", "transformers", "numpy"}
PARTS = {f"plexrl.{name}" for name in ("model", "rewards", "router", "scheduler", "sim", "worker")}
# The environment may have a typer that needs it.
PYDANTIC = {"pydantic"} - {line.partition(">")[0] for line in requires("typer") or ()}
AVOIDED = {
    "import plexrl": SERVERS | COMPUTE | PARTS | {"httpx", "msgspec", "pydantic", "rich", "typer"},
    "--help": SERVERS
    | COMPUTE
    | PARTS
    | {"asyncio", "httpx", "msgspec", "pydantic", "rich.console"},
    "": SERVERS | COMPUTE | PARTS | PYDANTIC | {"asyncio", "httpx", "msgspec", "rich.console"},
    # It asks the cluster with httpx.
    "status": SERVERS
    | COMPUTE
    | PARTS
    | PYDANTIC
    | {"plexrl.client.blocking.job", "plexrl.cluster.config"},
}


def loaded(words: str, environment: dict[str, str]) -> set[str]:
    """The modules that a process has at the end of this command."""
    code = words if words == "import plexrl" else COMMAND.format(words=words.split())
    done = subprocess.run(
        [sys.executable, "-c", RUN.format(code=code)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stderr.splitlines()[-1]))


@pytest.fixture(scope="module")
def router() -> Iterator[LiveRouter]:
    with live_router() as found:
        yield found


@pytest.mark.parametrize("words", AVOIDED)
def test_a_command_loads_no_module_that_it_does_not_need(words: str, router: LiveRouter) -> None:
    found = loaded(words, {"PLEXRL_URL": router.url, "PLEXRL_API_KEY": OPERATOR_KEY})
    assert found & AVOIDED[words] == set()


def test_every_command_of_the_panels_can_be_imported_and_has_a_line_of_its_own() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    lines = CliRunner().invoke(app, ["--help"]).output.splitlines()
    for rows in PANELS.values():
        for name, (_, text) in rows.items():
            assert commands[name].name == name
            assert len([line for line in lines if line.split(f"  {name}  ")[-1].strip() == text])
    assert max(map(len, lines)) <= 80


def test_without_a_command_it_names_the_configured_cluster_without_its_password() -> None:
    environment = {"PLEXRL_URL": "https://me:secret@head:8443", "PLEXRL_API_KEY": ""}
    shown = CliRunner().invoke(app, [], env=environment)
    assert shown.exit_code == 0
    first, *rest = shown.output.splitlines()
    assert first.startswith("The cluster is at https://head:8443 (PLEXRL_URL). Set PLEXRL_API_KEY")
    assert any(line.startswith("  plexrl status ") for line in rest)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("me:secret@head:8443", "head:8443"),
        ("http://me:sec/ret@head", "http://head"),
        ("http://[::1", "http://[::1"),
        ("http://a:secret@h1,https://b:secret@h2", "http://h1,https://h2"),
    ],
)
def test_without_a_command_a_malformed_url_shows_no_password_either(url: str, shown: str) -> None:
    result = CliRunner().invoke(app, [], env={"PLEXRL_URL": url, "PLEXRL_API_KEY": "k"})
    assert result.exit_code == 0, result.exception
    assert result.output.startswith(f"The cluster is at {shown} (PLEXRL_URL).\n")


def test_without_a_command_a_damaged_record_is_no_cluster(tmp_path: Path) -> None:
    (tmp_path / "cluster.json").write_text("[]")
    environment = {"PLEXRL_URL": "", "PLEXRL_DATA_DIR": str(tmp_path)}
    result = CliRunner().invoke(app, [], env=environment)
    assert result.output.startswith("No cluster: none runs on "), result.exception


def test_without_a_command_and_a_cluster_it_says_how_to_start_one(tmp_path: Path) -> None:
    environment = {"PLEXRL_URL": "", "PLEXRL_DATA_DIR": str(tmp_path)}
    first, second, *_ = CliRunner().invoke(app, [], env=environment).output.splitlines()
    assert first == f"No cluster: none runs on {tmp_path}, and PLEXRL_URL is not set."
    assert second.startswith("  plexrl up ")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_commands_and_options(shell: str) -> None:
    def completed(line: str) -> str:
        environment = {
            "_PLEXRL_COMPLETE": f"complete_{shell}",
            "_TYPER_COMPLETE_ARGS": line,
            "_TYPER_COMPLETE_FISH_ACTION": "get-args",
            "COMP_WORDS": line,
            "COMP_CWORD": str(len(line.split(" ")) - 1),
        }
        return CliRunner().invoke(app, [], prog_name="plexrl", env=environment).output

    found = completed("plexrl sta")
    assert "status" in found
    assert "statemanager-status" in found
    assert "usage" not in found
    assert "drain" in completed("plexrl nodes dr")
    assert "--api-key-file" in completed("plexrl status --api")


def view(problems: int) -> StatusView:
    """A status with conditions, a held deployment and a part that has ended."""
    held = HeldView(
        deployment=DeploymentId("j/a"), code="memory_full", message="full", since=1.0, tries=2
    )
    return {
        "now": 100.0,
        "nodes": 3,
        "gpus": 24,
        "gpus_reserved": 16,
        "routers": 2,
        "jobs_live": 5,
        "jobs_total": 40,
        "deployments_waiting": 2,
        "deployments_impossible": 1,
        "deployments_over_slo": 0,
        "operations_pending": 12,
        "operations_finished": 900,
        "context_switches": 33,
        "tenants": 4,
        "held": [held],
        "eta_quality": {
            "estimates": 9,
            "mean_error_s": 1.0,
            "mean_late_s": 0.5,
            "slipped": 1,
            "early": 1,
            "late": 1,
            "ratios": {},
            "ratio_sum": 9.0,
        },
        "planning": {},
        "conditions": [
            {"code": f"condition_{index}", "since": 1e9, "message": "what it says"}
            for index in range(problems)
        ],
        "restarts": 2,
        "last_restart_at": 1e9,
        "parts": {
            "scheduler": {
                "restarts": 2,
                "last_restart_at": 1e9,
                "down_since": 1e9,
                "stuck_since": None,
            }
        },
    }


def test_status_begins_with_what_is_wrong_and_fits_a_screen(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show_status(view(problems=20))
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("wrong now")
    assert "condition_0" in shown[1] or "condition_0" in shown[2]
    assert f"{20 + 2 - PROBLEMS_MAX} more: plexrl status --json" in shown
    assert len(shown) <= 30
    show_status(view(problems=1))
    text = capsys.readouterr().out
    assert "scheduler has ended" in text
    assert "1 deployments ask for more than the nodes in service can give" in text


def test_status_counts_no_gpu_as_free_that_is_lost(capsys: pytest.CaptureFixture[str]) -> None:
    lost = view(problems=1)
    lost["gpus"], lost["gpus_reserved"] = 8, 16
    show_status(lost)
    text = capsys.readouterr().out
    assert "8, in groups 16\n" in text
    assert "free" not in text


def test_status_of_a_healthy_cluster_says_so_first(capsys: pytest.CaptureFixture[str]) -> None:
    healthy = view(problems=0)
    healthy["deployments_impossible"], healthy["parts"] = 0, {}
    show_status(healthy)
    assert capsys.readouterr().out.splitlines()[0] == "Nothing is wrong."
