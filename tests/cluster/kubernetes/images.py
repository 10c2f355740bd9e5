"""Images for tests: empty but for folders; a container sees this machine's programs in them.

The runtime's base specification mounts `/usr`, Python and the sources read-only into each
container (`mounts`). So the images hold nothing of their own, and whether an image holds what its
container needs is not shown.
"""

import hashlib
import io
import json
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.hosts.host import REPOSITORY, read_only_paths

Plain = dict[str, Any]
PREFIX = "registry.example.com/ml/"
PAUSE = "localhost/pause:1"
"""What holds the namespaces of a pod."""
PROGRAM = ["tini", "--", "python", "-m", "plexrl.cluster.kubernetes"]
"""As the images of `deploy/images` have it."""
USER = "plexrl:x:10001:10001::/tmp:/usr/sbin/nologin\n"
FOLDERS = ("etc", "proc", "sys", "dev", "tmp", "run", "var", "var/lib")
LINKS = ("bin", "lib", "lib64", "sbin")
FILES = ("ld.so.cache", "nsswitch.conf")
INDEX = "application/vnd.oci.image.index.v1+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar"


def write_images(path: Path, version: str) -> None:
    """An archive of the chart's images and of the pause image, in OCI's layout."""
    environment = [
        f"PATH={sys.prefix}/bin:/usr/local/bin:/usr/bin:/bin",
        f"PYTHONPATH={REPOSITORY}",
        *("HOME=/tmp", "PYTHONUNBUFFERED=1", "PYTHONDONTWRITEBYTECODE=1", "OMP_NUM_THREADS=1"),
    ]
    ours: Plain = {"Env": environment, "Entrypoint": PROGRAM, "User": "10001:10001"}
    with tarfile.open(path, "w") as archive:
        layer = _blob(archive, LAYER, _layer(()))
        manifests = [
            _image(archive, layer, f"{PREFIX}plexrl-{kind}:{version}", ours)
            for kind in ("control", "node")
        ]
        pause: Plain = {"Env": environment, "Entrypoint": ["sleep", "infinity"]}
        # No mounts are added to this one.
        layer = _blob(archive, LAYER, _layer(_program("sleep")))
        manifests.append(_image(archive, layer, PAUSE, pause))
        index = {"schemaVersion": 2, "mediaType": INDEX, "manifests": manifests}
        _add(archive, "index.json", json.dumps(index).encode())
        _add(archive, "oci-layout", b'{"imageLayoutVersion": "1.0.0"}')


def mounts() -> list[Plain]:
    """What every container sees of this machine."""
    paths = [*read_only_paths(), *(Path("/etc", name) for name in FILES)]
    return [
        {"destination": str(path), "type": "bind", "source": str(path), "options": ["rbind", "ro"]}
        for path in paths
    ]


def _image(archive: tarfile.TarFile, layer: Plain, name: str, config: Plain) -> Plain:
    described = {
        "architecture": "amd64",
        "os": "linux",
        "config": config,
        "rootfs": {"type": "layers", "diff_ids": [layer["digest"]]},
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": _blob(archive, CONFIG, json.dumps(described).encode()),
        "layers": [layer],
    }
    found = _blob(archive, MANIFEST, json.dumps(manifest).encode())
    return {**found, "annotations": {"io.containerd.image.name": name}}


def _program(name: str) -> list[Path]:
    """The files of a program: itself and its libraries."""
    found = shutil.which(name)
    assert found is not None, name
    shown = subprocess.run(["ldd", found], capture_output=True, text=True, check=True).stdout
    return [Path(found), *(Path(path) for path in re.findall(r"(/\S+) \(0x", shown))]


def _layer(files: Sequence[Path]) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as layer:
        for name in FOLDERS:
            made = tarfile.TarInfo(name)
            made.type, made.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
            layer.addfile(made)
        for name, target in [*((name, f"usr/{name}") for name in LINKS), ("var/run", "/run")]:
            made = tarfile.TarInfo(name)
            made.type, made.linkname = tarfile.SYMTYPE, target
            layer.addfile(made)
        _add(layer, "etc/passwd", USER.encode())
        for path in files:
            name = str(path).lstrip("/")
            inside = name if name.startswith("usr/") else f"usr/{name}"
            _add(layer, inside, path.read_bytes(), 0o755)
    return content.getvalue()


def _blob(archive: tarfile.TarFile, kind: str, content: bytes) -> Plain:
    digest = hashlib.sha256(content).hexdigest()
    _add(archive, f"blobs/sha256/{digest}", content)
    return {"mediaType": kind, "digest": f"sha256:{digest}", "size": len(content)}


def _add(archive: tarfile.TarFile, name: str, content: bytes, mode: int = 0o644) -> None:
    made = tarfile.TarInfo(name)
    made.size, made.mode = len(content), mode
    archive.addfile(made, io.BytesIO(content))
