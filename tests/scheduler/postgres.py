"""A PostgreSQL server for the tests: a process of its own, on a Unix socket in its own folder."""

import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from importlib.util import find_spec
from pathlib import Path

import psutil

START_S = 60


def server_folder() -> Path | None:
    """Where `initdb` and `pg_ctl` lie; None where no server or no client library is installed."""
    if find_spec("psycopg") is None:
        return None
    found = shutil.which("initdb")
    if found is not None:
        return Path(found).resolve().parent
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    return next((folder for folder in reversed(folders) if (folder / "initdb").exists()), None)


class PostgresServer:
    """Runs until `close`; every `database` is new and empty."""

    def __init__(self, binaries: Path, folder: Path | None = None) -> None:
        """`folder`: a new folder for everything; absent: one of its own."""
        self._binaries = binaries
        # A short path, as those of sockets are; the server's user must be able to reach it.
        if folder is None:
            folder = Path(tempfile.mkdtemp(prefix="plexrl-postgres-"))
        else:
            folder.mkdir()
        self._folder = folder
        self._user = _server_user()
        self._count = itertools.count(1)
        if self._user is not None:
            shutil.chown(self._folder, self._user)
        self._call("initdb", "-A", "trust", "-U", "plexrl", "-E", "UTF8", "-N")
        self.start()

    def send(self, sig: signal.Signals) -> None:
        """Give a signal to the server and its backends."""
        main = int((self._folder / "data" / "postmaster.pid").read_text().split()[0])
        server = psutil.Process(main)
        for process in (*server.children(recursive=True), server):
            process.send_signal(sig)

    def database(self, folder: str = "") -> str:
        """The URL of a new database, for processes that see the server's folder as `folder`."""
        import psycopg

        name = f"journal{next(self._count)}"
        with psycopg.connect(self._dsn("postgres"), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}".encode())
        return f"postgresql://plexrl@/{name}?host={folder or self._folder}"

    def start(self) -> None:
        """Start the server; also again, after `stop`."""
        options = f"-k {self._folder} -c listen_addresses='' -c fsync=off"
        log = str(self._folder / "log")
        self._call("pg_ctl", "-w", "-t", str(START_S), "-o", options, "-l", log, "start")

    def stop(self) -> None:
        """End the server and every connection to it; its databases stay."""
        self._call("pg_ctl", "-w", "-m", "fast", "stop")

    def close(self) -> None:
        """End the server and remove all of it."""
        self._call("pg_ctl", "-m", "immediate", "stop")
        shutil.rmtree(self._folder, ignore_errors=True)

    def _dsn(self, database: str) -> str:
        return f"host={self._folder} user=plexrl dbname={database}"

    def _call(self, program: str, *arguments: str) -> None:
        done = subprocess.run(
            [str(self._binaries / program), "-D", str(self._folder / "data"), *arguments],
            user=self._user,
            cwd=self._folder,
            stdin=subprocess.DEVNULL,
            # The server keeps what it inherits open; a pipe would never end.
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=2 * START_S,
            check=False,
        )
        assert done.returncode == 0, f"{program} {' '.join(arguments)} ended with {done.returncode}"


def _server_user() -> str | None:
    """A user that is not root, for the server refuses that one; None where we are none."""
    if os.getuid() != 0:
        return None
    known = {entry.pw_name for entry in pwd.getpwall()}
    return next(name for name in ("postgres", "nobody") if name in known)
