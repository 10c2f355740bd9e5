"""Follows a page of the documentation on simulated hosts: every command of its sessions, in order.

A session is a block of the language `console`. `gpu1$ COMMAND` is typed on the host `gpu1`; the
lines below are its output, of which `…` stands for any text and a word of `VALUES` for a value that
later commands and files contain. A block that begins with the comment `# HOST:PATH` is that file.

A host is what an operator finds on a bare machine, with these differences:

- The test is root, so `sudo COMMAND` is run without `sudo`.
- A virtual environment that the page makes is this machine's, which has the packages already:
  `pip install` needs no network, and fails if a package of the named extras is missing.
- There is no SSH: `scp FILE HOST:` copies the file.
- systemd does not run: `systemctl` checks the unit with `systemd-analyze verify` and runs its
  command as the unit says, without the sandbox (`ProtectSystem` and the like).
"""

import re
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from configparser import ConfigParser
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

from tests.hosts.host import HOME, REPOSITORY, Host, HostProcess
from tests.hosts.network import Network

VALUES = ("TOKEN", "KEY")
PROMPT = re.compile(r"(\w+)\$ (.*)")
FILE = re.compile(r"# (\w+):(\S+)\n")
VENV = re.compile(r"(?:sudo )?python3 -m venv (\S+)")
SERVES = "Ctrl-C ends it"
"""In the output of a command that runs until Ctrl-C."""
CTRL_C = "^C"
LIMIT_S = 600.0
LOOK_S = 1.0
UNITS = "/etc/systemd/system"
SERVICE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin"
"""systemd's default PATH of services."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Typed:
    """A command on the page, or with `file` the content of a file."""

    line: int
    """Of the page, from 1."""
    host: str
    command: str
    output: tuple[str, ...] = ()
    file: str = ""


def sections(page: Path) -> dict[str, list[Typed]]:
    """What is to be typed, by heading of the page."""
    found: dict[str, list[Typed]] = {"": []}
    tokens = MarkdownIt("commonmark").enable("table").parse(page.read_text())
    for token, following in zip(tokens, [*tokens[1:], None], strict=True):
        if token.type == "heading_open" and following is not None:
            heading = following.content
            found[heading] = []
        if token.type != "fence" or token.map is None:
            continue
        file = FILE.match(token.content)
        if token.info == "console":
            found[heading] += _session(token.content, token.map[0] + 2)
        elif file is not None:
            found[heading].append(
                Typed(line=token.map[0] + 2, host=file[1], command=token.content, file=file[2])
            )
    return {heading: typed for heading, typed in found.items() if typed}


def _session(text: str, line: int) -> Iterator[Typed]:
    host, command, first = "", "", line
    output: list[str] = []
    for number, each in enumerate(text.splitlines(), line):
        if command.endswith("\\"):
            command = command.removesuffix("\\") + each.strip()
        elif (found := PROMPT.match(each)) is not None:
            if command:
                yield Typed(line=first, host=host, command=command, output=tuple(output))
            host, command, output, first = found[1], found[2], [], number
        else:
            assert command, f"line {number}: a session begins with a prompt, not with {each!r}"
            output.append(each)
    if command:
        yield Typed(line=first, host=host, command=command, output=tuple(output))


class Reader:
    """Somebody who follows the page."""

    def __init__(self, network: Network, groups: Mapping[str, tuple[str, ...]]) -> None:
        """`groups`: the hosts that a prompt stands for, if it is not the name of one."""
        self._network = network
        self._groups = groups
        self._users = {host.name: "root" for host in network}
        self._running: dict[str, HostProcess] = {}
        self._services: dict[tuple[str, str], HostProcess] = {}
        self._values: dict[str, str] = {}
        for host in network:
            host.on_disk(UNITS).mkdir(parents=True)

    def follow(self, typed: Typed) -> None:
        """Type one command, and compare what it prints."""
        for name in self._groups.get(typed.host, (typed.host,)):
            host = self._network[name]
            try:
                self._follow(host, typed)
            except AssertionError as error:
                raise AssertionError(f"line {typed.line}, on {name}: {error}") from error

    def _follow(self, host: Host, typed: Typed) -> None:
        command = self._filled(typed.command)
        if typed.file:
            host.on_disk(typed.file).parent.mkdir(parents=True, exist_ok=True)
            host.on_disk(typed.file).write_text(command)
        elif command == CTRL_C:
            assert self._running.pop(host.name).end(signal.SIGINT) == 0
        elif command.startswith("sudo -iu "):
            self._users[host.name] = command.split()[-1]
        elif (made := VENV.fullmatch(command)) is not None:
            folder = Path(self._home(host.name), made[1])
            host.on_disk(folder).symlink_to(Path(sys.prefix).resolve())
        elif command.startswith("scp "):
            _, source, target = command.split()
            name, _, path = target.partition(":")
            home = self._network[name].on_disk(self._home(name))
            shutil.copy(host.on_disk(source), home / (path or Path(source).name))
        elif command.startswith("sudo systemctl "):
            self._systemctl(host, *command.split()[2:])
        else:
            self._run(host, command, typed.output)

    def _run(self, host: Host, command: str, expected: tuple[str, ...]) -> None:
        user = self._users[host.name]
        if command.startswith("sudo "):
            user, command = "root", command.removeprefix("sudo ")
        process = self._shell(host, user, command)
        if any(SERVES in line for line in expected):
            process.wait_for(SERVES, LIMIT_S)
            self._running[host.name] = process
        else:
            assert process.wait(LIMIT_S) == 0, f"{command}: {process.text()[-4000:]}"
        missing = self._compare(expected, process.text())
        deadline = time.monotonic() + LIMIT_S
        # An operator looks again until the cluster is as the page says.
        while missing and command.startswith("plexrl nodes") and time.monotonic() < deadline:
            time.sleep(LOOK_S)
            process = self._shell(host, user, command)
            process.wait(LIMIT_S)
            missing = self._compare(expected, process.text())
        assert not missing, f"{command} did not print {missing!r}, but:\n{process.text()[-4000:]}"

    def _shell(self, host: Host, user: str, command: str) -> HostProcess:
        home = self._home(host.name, user)
        env = {"HOME": home, "USER": user, "PIP_NO_INDEX": "1"}
        words = ["bash", "-l", "-c", f"cd {home}; {command}"]
        return host.start(*_as(user), *words, env=env)

    def _home(self, host: str, user: str = "") -> str:
        user = user or self._users[host]
        return HOME if user == "root" else f"/home/{user}"

    def _filled(self, text: str) -> str:
        for name, value in self._values.items():
            text = re.sub(rf"\b{name}\b", value, text)
        return text

    def _compare(self, expected: tuple[str, ...], text: str) -> str:
        """The first line of `expected` that is not in `text`; empty: all are, in this order."""
        lines = iter([" ".join(line.split()) for line in text.splitlines()])
        for line in filter(str.strip, expected):
            pattern = re.escape(" ".join(line.split())).replace("…", ".*")
            for name in VALUES:
                pattern = re.sub(rf"\b{name}\b", rf"(?P<{name}>\\S+)", pattern)
            for actual in lines:
                if (found := re.fullmatch(pattern, actual)) is not None:
                    self._values |= found.groupdict()
                    break
            else:
                return line
        return ""

    def _systemctl(self, host: Host, verb: str, *words: str) -> None:
        if verb == "daemon-reload":
            return
        unit = words[-1].removesuffix(".service")
        path = f"{UNITS}/{unit}.service"
        if verb == "disable":
            # `plexrl node leave` has ended the service, which a unit may not start again then.
            assert self._services.pop((host.name, unit)).wait(LIMIT_S) == 0
            return
        assert (verb, *words[:-1]) == ("enable", "--now"), f"systemctl {verb} {words}"
        host.run("systemd-analyze", "verify", path)
        self._services[host.name, unit] = start_unit(host, path)


def start_unit(host: Host, path: str) -> HostProcess:
    """Run the command of a unit on a host, with the user and the environment that the unit says."""
    parser = ConfigParser(interpolation=None, strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # as its documentation says
    parser.read(host.on_disk(path))
    service = parser["Service"]
    variables = [f"PATH={SERVICE_PATH}", *shlex.split(service.get("Environment", ""))]
    if "EnvironmentFile" in service:
        lines = host.on_disk(service["EnvironmentFile"]).read_text().splitlines()
        variables += [line for line in lines if not line.startswith("#")]
    user = service["User"]
    variables += [f"HOME=/home/{user}", f"USER={user}", f"LOGNAME={user}", "LANG=C.UTF-8"]
    # Where this machine's installation finds the sources under test.
    variables += [f"PYTHONPATH={REPOSITORY}", "OMP_NUM_THREADS=1"]
    given = dict(each.split("=", 1) for each in variables)
    words = shlex.split(service["ExecStart"].replace("%%", "%"))
    words = [re.sub(r"\$\{(\w+)\}", lambda name: given[name[1]], word) for word in words]
    bare = ["env", "--ignore-environment", "--chdir=/", *variables]
    return host.start(*_as(user), *bare, *words)


def _as(user: str) -> list[str]:
    if user == "root":
        return []
    return ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups"]
