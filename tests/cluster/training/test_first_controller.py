"""The README's first controller, run as a newcomer runs it."""

import os
import re
import subprocess
import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from plexrl.cluster.embedded.start import EmbeddedCluster

EXAMPLE = Path(__file__).parents[3] / "examples/first_controller.py"
SIZES = "STEPS, PROMPTS, SAMPLES = 150, 64, 8"


def test_the_first_controller_saves_a_checkpoint_that_transformers_loads(
    embedded: EmbeddedCluster,
) -> None:
    source = EXAMPLE.read_text()
    assert SIZES in source
    run = subprocess.run(
        [sys.executable, "-c", source.replace(SIZES, "STEPS, PROMPTS, SAMPLES = 3, 8, 4")],
        env={**os.environ, "PLEXRL_URL": embedded.url, "PLEXRL_API_KEY": embedded.api_key},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert "\x1b" not in run.stdout
    assert f"cluster: {embedded.url}" in run.stdout
    [job] = re.findall(r"job: (sort-\w+)", run.stdout)
    assert re.findall(r"step +(\d+)/3  reward +\d\.\d+", run.stdout) == ["1", "2", "3"]
    [path] = re.findall(r"from_pretrained\('(.+)'\)", run.stdout.splitlines()[-1])
    assert job in path
    assert AutoModelForCausalLM.from_pretrained(path).config.model_type == "qwen2"
    assert AutoTokenizer.from_pretrained(path)("12=")["input_ids"] == [4, 5, 13]
