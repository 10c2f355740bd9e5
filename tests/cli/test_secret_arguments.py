"""Commands take secrets from files, standard input and the environment, never as arguments."""

import re
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from plexrl.cli.app import app
from plexrl.cluster.config.options import ClusterOptions
from plexrl.errors import InvalidRequestError
from plexrl.events.config import BrokerConfig
from plexrl.secret_arguments import check_url
from tests.router.live_router import OPERATOR_KEY, LiveRouter, live_router
from tests.test_limits import commands

SECRET = re.compile(r"key|token|password|secret|credential")
NO_SECRETS = {
    *("--show-key", "--tls-key", "--mqtt-key", "--prompt-tokens", "--kv-token-bytes"),
}
"""Paths, flags and counts."""
COMMANDS = list(commands(typer.main.get_command(app)))


def secret_options() -> list[tuple[str, str]]:
    """Each option whose name says that its value is a secret."""
    return [
        (path, each.opts[0])
        for path, command in COMMANDS
        for each in command.params
        if each.opts[0].startswith("--")
        and SECRET.search(each.opts[0])
        and not each.opts[0].endswith("-file")
        and each.opts[0] not in NO_SECRETS
    ]


def test_the_scan_finds_keys_and_tokens() -> None:
    assert {name for _, name in secret_options()} == {"--api-key", "--token"}


@pytest.mark.parametrize(("path", "option"), secret_options())
def test_a_secret_as_an_argument_is_refused(path: str, option: str) -> None:
    (command,) = (found for name, found in COMMANDS if name == path)
    arguments = ["x" for each in command.params if each.required and each.nargs == 1]
    result = CliRunner().invoke(app, [*path.split()[1:], *arguments, option, "plx-secret"])
    assert isinstance(result.exception, InvalidRequestError), result.output
    assert f"{option}-file PATH" in result.exception.message
    assert "plx-secret" not in result.exception.message
    assert option not in CliRunner().invoke(app, [*path.split()[1:], "--help"]).output.split()


@pytest.fixture(scope="module")
def router() -> Any:
    with live_router() as found:
        yield found


@pytest.mark.parametrize("way", ["file", "input", "environment"])
def test_a_key_comes_from_a_file_standard_input_or_the_environment(
    router: LiveRouter, way: str, tmp_path: Path
) -> None:
    (tmp_path / "key").write_text(f"{OPERATOR_KEY}\n")
    words, text, variable = {
        "file": (["--api-key-file", str(tmp_path / "key")], None, "wrong"),
        "input": (["--api-key-file", "-"], f"{OPERATOR_KEY}\n", None),
        "environment": ([], None, OPERATOR_KEY),
    }[way]
    environment = {"PLEXRL_URL": router.url, "PLEXRL_API_KEY": variable}
    result = CliRunner().invoke(app, ["status", *words], input=text, env=environment)
    assert result.exit_code == 0, (result.output, result.exception)


@pytest.mark.parametrize("content", [None, "", "\n", b"\xff"])
def test_a_file_without_a_key_is_refused_by_name(
    content: str | bytes | None, tmp_path: Path
) -> None:
    path = tmp_path / "key"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    words = ["status", "--url", "http://127.0.0.1:1", "--api-key-file", str(path)]
    result = CliRunner().invoke(app, words)
    assert isinstance(result.exception, InvalidRequestError)
    assert f"--api-key-file {path}" in result.exception.message


def test_a_url_with_a_password_is_refused_as_an_argument() -> None:
    result = CliRunner().invoke(app, ["status", "--url", "http://a,http://me:pass@host"])
    assert isinstance(result.exception, InvalidRequestError)
    assert "PLEXRL_URL" in result.exception.message
    assert "pass@" not in result.exception.message
    with pytest.raises(InvalidRequestError, match="OTEL_EXPORTER_OTLP_HEADERS"):
        ClusterOptions(data_dir=Path("/x"), otlp_endpoint="http://me:pass@host/v1/traces")
    with pytest.raises(InvalidRequestError, match="PLEXRL_MQTT_PASSWORD"):
        BrokerConfig(url="mqtt://me:pass@host")
    for unreadable in ("me:pass@host:8443", "http://me:pass@[host"):
        with pytest.raises(InvalidRequestError, match="holds a user or a password"):
            check_url("url", unreadable, "")
    check_url("url", "http://a:1/x@y,https://b,http://[c", "")
