"""What simulated hosts promise: they share nothing but read-only programs; links can fail."""

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.hosts.datagrams import PORT, receive, send
from tests.hosts.host import REPOSITORY, Host, HostProcess
from tests.hosts.leftovers import PREFIX, remove_leftovers
from tests.hosts.network import Network

WRITABLE = ("/tmp", "/run", "/dev/shm", "/root", "/var/lib", "/var/tmp", "/etc", "/home")
LISTENER = f"""
import socket
listener = socket.create_server(("", {PORT}))
print("bound", flush=True)
while True:
    connection = listener.accept()[0]
    while chunk := connection.recv(100):
        print("got", chunk.decode(), flush=True)
    print("closed", flush=True)
"""
CLIENT = f"""
import socket, sys
connection = socket.create_connection((sys.argv[1], {PORT}))
connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(sys.argv[2]))
for line in sys.stdin:
    connection.sendall(line.strip().encode())
    print("sent", line.strip(), flush=True)
    if line.startswith("last"):
        try:
            print("answered", connection.recv(100), flush=True)
        except OSError as error:
            print("failed", type(error).__name__, flush=True)
"""


def sleep(host: Host) -> HostProcess:
    """A process that does nothing."""
    process = host.start("sh", "-c", "echo started; exec sleep 4321")
    process.wait_for("started")
    while not host.processes("sleep 4321"):
        assert process.poll() is None
    return process


def test_what_one_host_writes_no_other_host_and_not_this_machine_reads(
    three_hosts: Network,
) -> None:
    head, a, b = three_hosts
    for folder in WRITABLE:
        name = f"{folder}/plexrl-seen-elsewhere"
        a.run("sh", "-c", f"echo from a > {name}")
        assert a.path(name).read_text() == "from a\n"
        for other in (head, b):
            assert other.run("cat", name, check=False).returncode != 0
        assert not Path(name).exists()


def test_programs_and_sources_cannot_be_written(three_hosts: Network) -> None:
    _, a, _ = three_hosts
    for folder in (REPOSITORY, REPOSITORY / "plexrl", Path(sys.prefix), Path("/usr")):
        done = a.run("touch", f"{folder}/written", check=False)
        assert "Read-only file system" in done.stderr


def test_only_programs_and_sources_of_this_machine_are_mounted(three_hosts: Network) -> None:
    _, a, _ = three_hosts
    mounts = [line.split() for line in a.run("cat", "/proc/mounts").stdout.splitlines()]
    private = {"tmpfs", "proc", "sysfs", "devpts"}
    shared = [each for each in mounts if each[2] not in private and not each[1].startswith("/dev/")]
    assert [each[1] for each in shared if "rw" in each[3].split(",")] == ["/"]
    assert not a.path("/tmp").samefile("/tmp")
    assert not a.path("/").samefile("/")


def test_processes_are_seen_on_their_own_host_only(three_hosts: Network) -> None:
    _, a, b = three_hosts
    sleeper = sleep(a)
    assert [each.pid for each in a.processes("sleep 4321")] == [sleeper.pid]
    assert b.processes("sleep 4321") == []
    assert "sleep 4321" in a.run("ps", "ax").stdout
    assert "sleep 4321" not in b.run("ps", "ax").stdout
    with pytest.raises(AssertionError, match="b runs no process"):
        b.kill9("sleep 4321")
    a.kill9("sleep 4321")
    assert sleeper.wait(30.0) != 0


def test_orphans_of_a_killed_process_are_reaped(three_hosts: Network) -> None:
    _, a, _ = three_hosts
    parent = a.start("sh", "-c", "sleep 1234 & echo started; wait")
    parent.wait_for("started")
    a.kill9("sh -c")
    orphans = a.kill9("sleep 1234")
    _, alive = psutil.wait_procs(orphans, timeout=30)
    assert not alive
    assert a.run("ps", "axo", "stat,comm").stdout.count("sleep") == 0


def test_system_v_memory_and_abstract_sockets_are_private(three_hosts: Network) -> None:
    _, a, b = three_hosts
    listen = (
        "import socket, time; s = socket.socket(socket.AF_UNIX); s.bind('\\0plexrl'); s.listen(); "
        "print('bound', flush=True); time.sleep(600)"
    )
    connect = "import socket; socket.socket(socket.AF_UNIX).connect('\\0plexrl')"
    a.start("python", "-c", listen).wait_for("bound")
    a.run("python", "-c", connect)
    assert "ConnectionRefusedError" in b.run("python", "-c", connect, check=False).stderr
    a.run("ipcmk", "--shmem", "4096")
    rows = [len(host.run("ipcs", "--shmems").stdout.splitlines()) for host in (a, b)]
    assert rows[0] == rows[1] + 1


def test_names_and_clocks_differ(three_hosts: Network) -> None:
    names = [host.run("hostname").stdout.strip() for host in three_hosts]
    assert names == ["head", "a", "b"]
    read = "import time; print(time.monotonic())"
    clocks = [float(host.run("python", "-c", read).stdout) for host in three_hosts]
    here = time.monotonic()
    assert all(abs(clock - here) > 10_000 for clock in clocks)
    assert clocks[1] - clocks[0] > 10_000


def test_nothing_outside_the_network_is_reachable(three_hosts: Network) -> None:
    head, _, _ = three_hosts
    assert head.run("ip", "route").stdout.splitlines() == [
        f"10.77.0.0/24 dev eth0 proto kernel scope link src {head.address} "
    ]


def test_a_cut_drops_packets_both_ways_and_spares_other_links(three_hosts: Network) -> None:
    head, a, b = three_hosts
    at_a, at_b = receive(a), receive(b)
    three_hosts.cut(a, b)
    send(a, b, "lost1")
    send(b, a, "lost2")
    send(head, a, "head1")
    send(head, b, "head2")
    at_a.wait_for("got head1")
    at_b.wait_for("got head2")
    three_hosts.heal(a, b)
    send(a, b, "healed1")
    send(b, a, "healed2")
    at_b.wait_for("got healed1")
    at_a.wait_for("got healed2")
    assert "lost" not in at_a.text() + at_b.text()


def assert_lost(network: Network, a: Host, b: Host, at_b: HostProcess) -> None:
    """`b` never gets what `a` sent while the link was cut, and gets what comes after."""
    network.heal_all()
    send(a, b, "healed")
    at_b.wait_for("got healed")
    assert "lost" not in at_b.text()


def test_a_cut_can_have_one_direction(three_hosts: Network) -> None:
    _, a, b = three_hosts
    at_a, at_b = receive(a), receive(b)
    three_hosts.cut_one_way(a, b)
    send(a, b, "lost")
    send(b, a, "arrives")
    at_a.wait_for("got arrives")
    assert_lost(three_hosts, a, b, at_b)


def connection(a: Host, b: Host, timeout_ms: int) -> tuple[HostProcess, HostProcess]:
    """The ends of a connection of `a` to `b`, which works: the listener, then the client. The
    client gives up `timeout_ms` after something that was not confirmed; 0: as the kernel does."""
    listener = b.start("python", "-c", LISTENER)
    listener.wait_for("bound")
    client = a.start("python", "-c", CLIENT, b.address, str(timeout_ms))
    client.send("before\n")
    listener.wait_for("got before")
    return listener, client


def test_a_cut_resets_no_connection_and_what_was_sent_arrives_once_it_is_healed(
    three_hosts: Network,
) -> None:
    _, a, b = three_hosts
    listener, client = connection(a, b, timeout_ms=0)
    with three_hosts.partition(a, b):
        client.send("meanwhile\n")
        client.wait_for("sent meanwhile")
    listener.wait_for("got meanwhile")
    assert "closed" not in listener.text()


def test_a_cut_leaves_a_connection_half_open(three_hosts: Network) -> None:
    _, a, b = three_hosts
    listener, client = connection(a, b, timeout_ms=1000)
    three_hosts.cut(a, b)
    client.send("last\n")
    # The client's own time limit ends its side. The other side is never told.
    client.wait_for("failed TimeoutError")
    three_hosts.heal(a, b)
    assert "ESTAB" in b.run("ss", "-Htn", "sport", f"= {PORT}").stdout
    assert "last" not in listener.text()


def test_a_power_cut_kills_all_processes_and_keeps_the_disk_only(three_hosts: Network) -> None:
    head, a, b = three_hosts
    for folder in ("/root", "/var/lib", "/tmp", "/dev/shm"):
        a.run("sh", "-c", f"echo kept > {folder}/kept; sync")
    sleep(a)
    (sleeper,) = a.processes("sleep 4321")
    three_hosts.cut(a, b)
    a.power_off()
    assert not sleeper.is_running()
    a.power_on()
    assert a.processes() == []
    for folder, is_kept in (
        ("/root", True),
        ("/var/lib", True),
        ("/tmp", False),
        ("/dev/shm", False),
    ):
        assert a.path(f"{folder}/kept").exists() == is_kept
    at_b, at_head = receive(b), receive(head)
    send(a, b, "lost")
    send(a, head, "arrives")
    at_head.wait_for("got arrives")
    assert_lost(three_hosts, a, b, at_b)


def test_a_lost_host_never_comes_back(three_hosts: Network) -> None:
    _, a, _ = three_hosts
    a.lose()
    with pytest.raises(AssertionError, match="has no power"):
        a.run("true")
    with pytest.raises(AssertionError, match="is lost"):
        a.power_on()


def test_hosts_of_a_killed_run_are_removed_by_the_next(three_hosts: Network) -> None:
    run = (
        "import os, sys\n"
        "from tests.hosts.network import hosts\n"
        "with hosts('x') as network:\n"
        "    (x,) = network\n"
        "    x.start('sleep', '4321')\n"
        "    print(x.on_disk('/').parent, x.pid, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    killed = subprocess.Popen(
        [sys.executable, "-c", run], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with killed:
        assert killed.stdout is not None
        folder, pid = killed.stdout.readline().split()
        killed.kill()
    assert Path(folder).name.startswith(PREFIX)
    assert Path(folder).is_dir()
    first = psutil.Process(int(pid)) if psutil.pid_exists(int(pid)) else None
    remove_leftovers()
    assert not Path(folder).exists()
    if first is not None:
        psutil.wait_procs([first], timeout=30)
        assert not first.is_running()
    # The live network of this test is none of the leftovers.
    assert all(host.run("true").returncode == 0 for host in three_hosts)
