"""A scheduler and a router as real processes, without nodes, for tests over HTTP."""

import hashlib
import json
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx

from plexrl.wire.links.credentials import TlsFiles
from tests.warm_start import start_part

OPERATOR_KEY = "plx-operator"
END_S = 30.0


@dataclass(frozen=True)
class LiveRouter:
    """Port, log and process of the router."""

    port: int
    log: Path
    pid: int
    ca: str | None = None
    """Authority of the certificate; None: plain HTTP."""

    @property
    def url(self) -> str:
        return f"{'http' if self.ca is None else 'https'}://127.0.0.1:{self.port}"

    @contextmanager
    def client(self, key: str = OPERATOR_KEY, **options: Any) -> Iterator[httpx.Client]:
        headers = {"Authorization": f"Bearer {key}"}
        with httpx.Client(base_url=self.url, headers=headers, timeout=END_S, **options) as client:
            yield client


@contextmanager
def live_router(
    *,
    descriptors: int | None = None,
    https_files: TlsFiles | None = None,
    scheduler_config: Mapping[str, Any] = MappingProxyType({}),
    beside: Callable[[str], AbstractContextManager[None]] | None = None,
    **config: Any,
) -> Iterator[LiveRouter]:
    """A router with this configuration; `descriptors` is its hard limit on descriptors. With
    `https_files` it serves HTTPS. `scheduler_config` is what the scheduler has beside the usual.
    `beside` takes the scheduler's address; its block begins before the router."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/tmp")))
        scheduler = f"unix:{folder}/s.sock"
        stack.enter_context(
            _process(
                folder,
                "scheduler",
                {
                    "listen": [scheduler],
                    "journal": str(folder / "journal.sqlite"),
                    "operator_key_digest": hashlib.sha256(OPERATOR_KEY.encode()).hexdigest(),
                    **scheduler_config,
                },
            )
        )
        if beside is not None:
            stack.enter_context(beside(scheduler))
        wrapper = []
        if descriptors is not None:
            wrapper = ["sh", "-c", f'ulimit -n {descriptors}; exec "$@"', "sh"]
        router_config = {
            "router": "router0",
            "scheduler": [scheduler],
            "host": "127.0.0.1",
            "port": 0,
            "data_dir": str(folder / "data"),
            **config,
        }
        if https_files is not None:
            names = {"certificate": https_files.certificate, "key": https_files.key}
            router_config["https"] = names
        router, ready = stack.enter_context(_process(folder, "router", router_config, wrapper))
        ca = None if https_files is None else https_files.ca
        yield LiveRouter(ready["port"], folder / "router.log", router.pid, ca)


@contextmanager
def _process(
    folder: Path, name: str, config: dict[str, Any], wrapper: Sequence[str] = ()
) -> Iterator[tuple["subprocess.Popen[str]", dict[str, Any]]]:
    path = folder / f"{name}.json"
    path.write_text(json.dumps(config))
    with (folder / f"{name}.log").open("w") as log:
        process = start_part(
            f"plexrl.{name}",
            ("--config", str(path)),
            wrapper,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line, (folder / f"{name}.log").read_text()
        yield process, json.loads(line)
    finally:
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
