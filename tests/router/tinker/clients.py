"""A cluster and clients of the Tinker SDK, for tests."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import tinker
import torch
from tinker import types

import plexrl
from plexrl.cluster.embedded.start import EmbeddedCluster
from plexrl.model.text.tokenizer import char_tokenizer_json
from plexrl.worker.models import build_model

VOCABULARY = "0123456789sr="
ROWS = [[3, 4, 5, 6, 7, 8], [9, 10, 11, 3], [3, 3, 3, 3, 4, 5, 6]]
LIMIT_S = 120.0


def model_folder(folder: Path) -> Path:
    """A Hugging Face directory with a small model and its tokenizer."""
    spec = plexrl.tiny_qwen2(VOCABULARY, seed=4, hidden=32)
    model: Any = build_model(spec)
    model.to(torch.float32).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(char_tokenizer_json(VOCABULARY))
    (folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}'
    )
    return folder


@dataclass(frozen=True, slots=True)
class Tenant:
    """Where the cluster is, and a tenant's key as the SDK takes it."""

    url: str
    key: str

    @contextmanager
    def service(self) -> Iterator[tinker.ServiceClient]:
        """A client of the SDK, which ends its session."""
        with tinker.ServiceClient(base_url=self.url, api_key=self.key) as made:
            yield made

    def http(self, api: str = "/api/v1") -> httpx.Client:
        """A client of plain HTTP."""
        headers = {"X-API-Key": self.key, "Authorization": f"Bearer {self.key[4:]}"}
        return httpx.Client(base_url=f"{self.url}{api}", headers=headers, timeout=60)


def add_tenant(cluster: EmbeddedCluster, roots: Path, url: str) -> Tenant:
    """A tenant that may load the models below `roots` and reaches the cluster at `url`."""
    headers = {"Authorization": f"Bearer {cluster.api_key}"}
    operator_url = cluster.url.split(",")[0]
    with httpx.Client(base_url=operator_url, headers=headers, timeout=60) as operator:
        key = operator.post("/v1/tenants", json={"name": "lab"}).json()["api_key"]
        settings = {"model_roots": [str(roots)]}
        operator.patch("/v1/tenants/lab", json=settings).raise_for_status()
    return Tenant(url=url, key=f"tml-{key}")


def datum(row: Sequence[int], **inputs: Any) -> types.Datum:
    """A row and its targets, the row shifted by one token."""
    given: dict[str, Any] = {"target_tokens": list(row[1:]), **inputs}
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(row[:-1])),
        loss_fn_inputs=given,
    )


def supervised(rows: Sequence[Sequence[int]] = ROWS) -> list[types.Datum]:
    """Rows for `cross_entropy`, in which all targets count."""
    return [datum(row, weights=[1.0] * (len(row) - 1)) for row in rows]


def prompt(tokens: Sequence[int]) -> types.ModelInput:
    """A prompt of the SDK."""
    return types.ModelInput.from_ints(list(tokens))
