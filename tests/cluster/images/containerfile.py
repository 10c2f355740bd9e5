"""Runs a Containerfile's steps on folders, each in a sandbox of bubblewrap, as root.

It knows what `deploy/images` uses: `ARG`, `FROM … AS`, `RUN`, `COPY [--from=]`, `WORKDIR`, `ENV`,
`USER`, `ENTRYPOINT`; `LABEL` and `CMD` change nothing. Layers, ignore files and caches are not
modelled.
"""

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

WHEELS = "/wheels"
"""Where a step finds the packages."""
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, kw_only=True)
class Image:
    """One stage: a root file system, and how a container of it starts."""

    root: Path
    environment: Mapping[str, str] = field(default_factory=lambda: {"PATH": PATH})
    folder: str = "/"
    user: str = "0"
    entrypoint: tuple[str, ...] = ()

    def command(
        self,
        words: Sequence[str],
        *,
        user: int,
        writable: Mapping[Path, str],
        environment: Mapping[str, str] | None = None,
    ) -> list[str]:
        """How to run `words` in a container of this image: its root is read-only but for `/tmp` and
        the folders `writable` of this machine, and no name belongs to `user`."""
        box = ["bwrap", "--die-with-parent", "--ro-bind", str(self.root), "/", "--dev", "/dev"]
        box += ["--proc", "/proc", "--unshare-pid", "--as-pid-1"]
        for folder in ("/tmp", "/dev/shm"):
            box += ["--perms", "1777", "--tmpfs", folder]
        box += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--clearenv"]
        for outside, inside in writable.items():
            box += ["--bind", str(outside), inside]
        for name, value in {**self.environment, **(environment or {})}.items():
            box += ["--setenv", name, value]
        become = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
        return [*box, "--chdir", self.folder, *become, "--no-new-privs", *words]


@dataclass(frozen=True)
class _Step:
    kind: str
    text: str


def build(
    containerfile: Path, base: Path, folder: Path, *, arguments: Mapping[str, str], wheels: Path
) -> Image:
    """The image of the last stage, made below `folder`. `base` is the root of each `FROM ${BASE}`,
    `arguments` are those of `--build-arg`; steps see `wheels` at `/wheels`.

    Raises:
        AssertionError: a step fails, or is of a kind that is not known.
    """
    context = containerfile.parents[2]
    stages: dict[str, Image] = {}
    image = Image(root=base)
    declared: dict[str, str] = {}
    for step in _steps(containerfile.read_text()):
        if step.kind == "FROM":
            name = step.text.partition(" AS ")[2] or "last"
            image = stages[name] = Image(root=_copied(base, folder / name))
            declared = {}
        elif step.kind == "ARG":
            name, _, default = step.text.partition("=")
            declared[name] = arguments.get(name, default.strip('"'))
        elif step.kind == "RUN":
            _run(image, step.text, declared, wheels)
        elif step.kind == "COPY":
            _copy(image, step.text, context, stages)
        elif step.kind == "ENV":
            given = dict(word.split("=", 1) for word in shlex.split(step.text))
            image = replace(image, environment={**image.environment, **given})
        elif step.kind == "WORKDIR":
            image = replace(image, folder=step.text)
            _inside(image, step.text).mkdir(parents=True, exist_ok=True)
        elif step.kind == "USER":
            image = replace(image, user=step.text)
        elif step.kind == "ENTRYPOINT":
            image = replace(image, entrypoint=tuple(json.loads(step.text)))
        else:
            assert step.kind in {"LABEL", "CMD"}, step
    return image


def _steps(text: str) -> Iterator[_Step]:
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        if line.strip():
            kind, _, rest = line.partition(" ")
            yield _Step(kind, rest.strip())


def _copied(base: Path, root: Path) -> Path:
    subprocess.run(["cp", "-a", "--reflink=auto", str(base), str(root)], check=True)
    return root


def _inside(image: Image, path: str) -> Path:
    return image.root / str(Path(image.folder, path)).lstrip("/")


def _run(image: Image, script: str, declared: Mapping[str, str], wheels: Path) -> None:
    box = ["bwrap", "--bind", str(image.root), "/", "--dev", "/dev", "--proc", "/proc"]
    box += ["--unshare-pid", "--cap-add", "ALL", "--clearenv", "--tmpfs", WHEELS]
    box += ["--ro-bind", str(wheels), WHEELS, "--chdir", image.folder]
    for name, value in {**image.environment, **declared}.items():
        box += ["--setenv", name, value]
    done = subprocess.run(
        [*box, "/bin/sh", "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{script}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"


def _copy(image: Image, text: str, context: Path, stages: Mapping[str, Image]) -> None:
    words = text.split()
    source = context
    if words[0].startswith("--from="):
        source = stages[words.pop(0).removeprefix("--from=")].root
    *names, target = words
    to = _inside(image, target)
    for name in names:
        whole = source / name.lstrip("/")
        # A folder's content is copied, a file into the folder.
        content = [f"{whole}/."] if whole.is_dir() else [str(whole)]
        to.mkdir(parents=True, exist_ok=True)
        subprocess.run(["cp", "-a", "--reflink=auto", *content, str(to)], check=True)
    if source == context:
        for cache in to.rglob("__pycache__"):
            shutil.rmtree(cache)
