"""Names and reasons given by tenants cannot control an operator's terminal."""

import subprocess
import sys

import httpx
import pytest
from typer.testing import CliRunner

import plexrl
from plexrl.cli.app import app
from plexrl.cluster.embedded.start import EmbeddedCluster
from tests.cluster.tools import VOCABULARY

CLEAR = "\x1b[2J\x1b]0;all is well\x07"
BIDI = "\u202egpj.exe"
HOSTILE = f"{CLEAR}{BIDI}\r\x9b31m\nNAME      STATE"
MODEL = plexrl.tiny_qwen2(VOCABULARY)


def cli(embedded: EmbeddedCluster, *words: str) -> str:
    done = CliRunner().invoke(app, [*words, "--data-dir", str(embedded.data_dir)])
    assert done.exit_code == 0, done.output
    return done.output


def assert_plain(shown: str) -> None:
    left = [each for each in shown if not each.isprintable() and each not in "\n\t"]
    assert left == []


def test_reasons_are_shown_with_escapes(embedded: EmbeddedCluster, cluster: plexrl.Cluster) -> None:
    key = cluster.create_tenant("hostile")
    with plexrl.connect(embedded.url, key) as tenant:
        job = tenant.create_job("quiet", job_id="hostile")
        job.train_deployment("actor", MODEL).barrier().result(120)
        logs = cli(embedded, "logs", "hostile")
        job.finish("failed", reason=HOSTILE)
    shown = [
        cli(embedded, *words)
        for words in (
            ("jobs", "--all"),
            ("jobs", "hostile"),
            ("explain", "hostile"),
            ("operations", "hostile"),
            ("jobs", "--all", "--json"),
            ("usage",),
            ("usage", "--csv"),
            ("tenants", "list"),
            ("status",),
        )
    ]
    for each in (logs, *shown):
        assert_plain(each)
    assert r"\u001b[2J" in shown[0].replace("\n", "").replace(" ", ""), "the reason is shown"
    refused = subprocess.run(
        [sys.executable, "-m", "plexrl.cli.app", "jobs", CLEAR, "--data-dir", embedded.data_dir],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=120,
    )
    assert refused.returncode == 1
    assert "all is well" in refused.stdout
    assert_plain(refused.stdout)


def test_names_with_control_characters_are_refused(
    embedded: EmbeddedCluster, cluster: plexrl.Cluster
) -> None:
    job = cluster.create_job("größer 訓練", job_id="wide")
    headers = {"Authorization": f"Bearer {embedded.api_key}"}
    for name in (CLEAR, BIDI, "two\nlines", "\x9b31m"):
        answer = httpx.post(
            f"{embedded.url}/v1/jobs",
            json={"job": "refused", "name": name},
            headers=headers,
            timeout=60,
        )
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "invalid_request")
        assert "control characters" in error["message"]
        assert_plain(error["message"])
        with pytest.raises(plexrl.errors.InvalidRequestError, match="control characters"):
            cluster.create_job(name, job_id="refused")
        with pytest.raises(plexrl.errors.InvalidRequestError, match="control characters"):
            job.train_deployment("actor", MODEL, node_type=name)
    job.finish()
