"""Fills the settings of a pod's process: a ConfigMap's JSON with values that only the pod knows.

A string of the template may hold `${NAME}`, a variable of the environment; `${sha256:NAME}`, its
digest; and `${label:KEY}`, a label of the pod's Kubernetes node. A label's value has no slash, so
several make a block: `${label:row}/${label:rack}`. Secrets arrive as variables of this process
alone; what is written stays in the pod's memory.
"""

import hashlib
import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plexrl.errors import InvalidRequestError
from plexrl.process.folders.operator_key import write_private

LOG = logging.getLogger(__name__)

_PLACE = re.compile(r"\$\{(?:(sha256|label):)?([A-Za-z0-9_./-]+)\}")


def fill(template: Any, environment: Mapping[str, str], labels: Mapping[str, str]) -> Any:
    """The template with all places filled; a label that the node lacks becomes empty.

    Raises:
        InvalidRequestError: a variable is not set.
    """
    if isinstance(template, str):
        filled = _PLACE.sub(lambda place: _value(place, environment, labels), template)
        if "${label:" in template:
            # Labels of a hierarchy, such as row and rack, of which a node may lack some.
            return "/".join(part for part in filled.split("/") if part)
        return filled
    if isinstance(template, list):
        return [fill(each, environment, labels) for each in template]
    if isinstance(template, dict):
        return {name: fill(each, environment, labels) for name, each in template.items()}
    return template


def write_settings(
    templates: Path, folder: Path, environment: Mapping[str, str], labels: Mapping[str, str]
) -> list[Path]:
    """Write each filled `*.json` of `templates` to a private file in `folder`.

    Raises:
        InvalidRequestError: a template is no JSON, or a variable is not set.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    written = []
    for path in sorted(templates.glob("*.json")):
        try:
            template = json.loads(path.read_text())
        except ValueError as error:
            raise InvalidRequestError(f"{path} is no JSON: {error}") from error
        filled = fill(template, environment, labels)
        write_private(folder / path.name, json.dumps(filled, indent=1))
        written.append(folder / path.name)
    if not written:
        raise InvalidRequestError(f"{templates} has no file *.json: mount the ConfigMap there")
    return written


def copy_secret(source: Path, target: Path) -> None:
    """Copy a mounted secret to a file that only its owner may read; a Secret's volume lets the
    pod's group read it, which PlexRL refuses.

    Raises:
        InvalidRequestError: the secret cannot be read.
    """
    try:
        content = source.read_bytes()
    except OSError as error:
        raise InvalidRequestError(f"the secret {source} cannot be read: {error}") from error
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    target.touch(mode=0o600)
    target.write_bytes(content)


def with_host(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment with `POD_HOST`: the pod's address as it is written before a port."""
    address = environment.get("POD_IP", "")
    return {**environment, "POD_HOST": f"[{address}]" if ":" in address else address}


def node_labels(node: str) -> dict[str, str]:
    """Labels of a Kubernetes node.

    Raises:
        ApiException: the API server refuses.
    """
    from kubernetes.client import CoreV1Api

    from plexrl.cluster.kubernetes.api import TIMEOUT_S, connect

    found = CoreV1Api(connect()).read_node(node, _request_timeout=TIMEOUT_S)
    return dict(found.metadata.labels or {})


def _value(place: re.Match[str], environment: Mapping[str, str], labels: Mapping[str, str]) -> str:
    kind, name = place.groups()
    if kind == "label":
        value = labels.get(name)
        if value is None:
            LOG.warning("the node has no label %s: the setting is empty", name)
        return value or ""
    found = environment.get(name)
    if found is None:
        raise InvalidRequestError(f"the variable {name} of {place.group()} is not set")
    return hashlib.sha256(found.encode()).hexdigest() if kind == "sha256" else found
