"""The endpoint of the cluster that runs on a data directory, stored there as `cluster.json`."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plexrl.cluster.data_dir.folder import OTHERWISE, is_locked
from plexrl.errors import ConflictError
from plexrl.process.folders.operator_key import NAME as KEY_NAME
from plexrl.process.folders.operator_key import operator_key

NAME = "cluster.json"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """URLs, key and process of a running cluster."""

    url: str
    """URLs of all routers, separated by commas."""
    api_key: str
    """The operator's key."""
    pid: int
    """Process id of the supervisor."""
    data_dir: str
    is_embedded: bool = False
    """Whether the cluster ends with the last script that uses it."""
    ca: str = ""
    """PEM file with the authority of the API's certificate; empty: every machine trusts it, or the
    API is plain HTTP."""
    public_url: str = ""
    """URLs for clients on other machines; empty: there are none."""
    join_address: str = ""
    """Where other machines join as nodes; empty: none can."""
    gpus: str = ""
    """The GPUs of each node of this machine; empty: none serves, or another process has started
    them."""

    @property
    def key_file(self) -> Path:
        """The private file with the operator's key."""
        return Path(self.data_dir) / KEY_NAME

    def to_json(self) -> str:
        """The output of `plexrl up --json`: where the key is, but not the key itself."""
        return json.dumps(
            {
                "url": self.url,
                "key_file": str(self.key_file),
                "pid": self.pid,
                "data_dir": self.data_dir,
                "gpus": self.gpus,
                **(self._network() if self.join_address else {}),
            }
        )

    def to_file(self) -> str:
        """The content of `cluster.json`, without the key."""
        body = {"url": self.url, "pid": self.pid, "embedded": self.is_embedded}
        return json.dumps({**body, **self._network()})

    def serves(self, urls: str) -> bool:
        """Whether one of these URLs, separated by commas, is this cluster's."""
        own = f"{self.url},{self.public_url}".split(",")
        return any(url.strip().rstrip("/") in own for url in urls.split(",") if url.strip())

    def _network(self) -> dict[str, str]:
        return {"ca": self.ca, "public_url": self.public_url, "join_address": self.join_address}


def read_endpoint(data_dir: Path) -> Endpoint | None:
    """The cluster that runs on a data directory; None if there is none, or it is starting or
    ending. A file left by a killed cluster does not count."""
    try:
        body: dict[str, Any] = json.loads((data_dir / NAME).read_text())
        pid = int(body["pid"])
        os.kill(pid, 0)
        if not is_locked(data_dir):
            return None
        key = operator_key(data_dir)
        network = {name: str(body.get(name, "")) for name in ("ca", "public_url", "join_address")}
        embedded = bool(body.get("embedded"))
        return Endpoint(body["url"], key, pid, str(data_dir), embedded, **network)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def in_use(data_dir: Path) -> ConflictError:
    """The error that a cluster runs on the data directory already."""
    running = read_endpoint(data_dir)
    what, who, mend = "a cluster", "", "end it"
    if running is not None:
        who = f" (process {running.pid}, {running.url})"
        if running.is_embedded:
            what, mend = "an embedded cluster", "wait for the end of the scripts that use it"
    return ConflictError(
        f"{what} runs on {data_dir} already{who}: {mend}, or {OTHERWISE}", data_dir=str(data_dir)
    )
