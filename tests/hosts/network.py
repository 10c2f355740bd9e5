"""A network of simulated hosts on one machine: `with hosts("head", "a", "b") as (head, a, b): …`.

Each host has network, mount, PID, IPC, UTS and time namespaces of its own. A bridge in one more
network namespace joins the hosts, so nothing of this machine's network is used or changed. Nothing
that is written on one host can be read on another: hosts share read-only programs only.

A link is cut by the neighbour table of the sender: its frames to the other host go to a hardware
address that nobody has. Packets vanish in silence, as in a broken switch: no reset, no ICMP error.
"""

import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from tests.hosts.host import NAMESPACES, Host
from tests.hosts.leftovers import make_folder, record, remove

PROGRAMS = ("ip", "mount", "nsenter", "pivot_root", "setsid", "umount", "unshare")
SWITCH = "switch"
NOBODY = "02:00:0a:4d:ff:ff"
SHARED_MEMORY_BYTES = 1 << 30


class Network:
    """Hosts that reach each other, and the links between them."""

    def __init__(
        self,
        names: tuple[str, ...],
        shared_memory_bytes: int,
        disk_bytes: Mapping[str, int] | None = None,
    ) -> None:
        """`disk_bytes`: sizes of the disks that lose in a power cut what was not flushed, by
        host."""
        sizes = disk_bytes or {}
        self._folder, self._lock = make_folder()
        self._cuts: set[tuple[str, str]] = set()
        self._switch = _Switch()
        record(self._folder, SWITCH, self._switch.pid)
        self.hosts = [
            Host(name, index, self._folder, self._connect, shared_memory_bytes, sizes.get(name))
            for index, name in enumerate(names)
        ]
        self._addresses = {host.name: host.address for host in self.hosts}

    def __iter__(self) -> Iterator[Host]:
        return iter(self.hosts)

    def __getitem__(self, name: str) -> Host:
        return next(host for host in self.hosts if host.name == name)

    def power_on(self) -> None:
        """Start all hosts."""
        for host in self.hosts:
            host.power_on(self._addresses)

    def cut(self, a: Host, b: Host) -> None:
        """From now on no packet passes between the two hosts; neither of them is told."""
        self.cut_one_way(a, b)
        self.cut_one_way(b, a)

    def cut_one_way(self, sender: Host, receiver: Host) -> None:
        """From now on no packet of `sender` reaches `receiver`; the other direction stays."""
        self._cuts.add((sender.name, receiver.name))
        self._set_neighbour(sender, receiver)

    def heal(self, a: Host, b: Host) -> None:
        """Both directions work again."""
        self.heal_one_way(a, b)
        self.heal_one_way(b, a)

    def heal_one_way(self, sender: Host, receiver: Host) -> None:
        """Packets of `sender` reach `receiver` again."""
        self._cuts.discard((sender.name, receiver.name))
        self._set_neighbour(sender, receiver)

    def heal_all(self) -> None:
        """All links work again."""
        for sender, receiver in sorted(self._cuts):
            self.heal(self[sender], self[receiver])

    def isolate(self, host: Host) -> None:
        """Cut all links of a host."""
        for other in self.hosts:
            if other is not host:
                self.cut(host, other)

    @contextmanager
    def partition(self, a: Host, b: Host) -> Iterator[None]:
        """The link between two hosts is cut while the block runs."""
        self.cut(a, b)
        try:
            yield
        finally:
            self.heal(a, b)

    def close(self) -> None:
        """End all hosts, and remove their disks."""
        for host in self.hosts:
            host.close()
        self._switch.close()
        remove(self._folder)
        self._lock.close()

    def _connect(self, host: Host) -> None:
        """Plug a host that was just started into the switch."""
        port = f"port{host.index}"
        self._switch.unplug(port)
        self._switch.ip(
            f"link add {port} type veth peer name eth0 address {_hardware(host)} netns {host.pid}",
            f"link set {port} master bridge up",
        )
        _ip(
            host.pid,
            "link set lo up",
            # Without it the kernel gives the interface an IPv6 address, whose links are never cut.
            "link set eth0 addrgenmode none",
            f"address add {host.address}/24 dev eth0",
            "link set eth0 up",
            *(self._neighbour(host, other) for other in self.hosts if other is not host),
        )

    def _set_neighbour(self, sender: Host, receiver: Host) -> None:
        if sender.has_power:
            _ip(sender.pid, self._neighbour(sender, receiver))

    def _neighbour(self, sender: Host, receiver: Host) -> str:
        is_cut = (sender.name, receiver.name) in self._cuts
        to = NOBODY if is_cut else _hardware(receiver)
        return f"neigh replace {receiver.address} lladdr {to} dev eth0 nud permanent"


class _Switch:
    """The network namespace of the bridge, held by a process that ends with this one."""

    def __init__(self) -> None:
        hold = ["unshare", "--net", "sh", "-c", "echo up; exec cat"]
        self._holder = subprocess.Popen(hold, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == b"up\n", "no network namespace"
        self.pid = self._holder.pid
        self.ip("link add bridge type bridge", "link set bridge up")

    def ip(self, *commands: str) -> None:
        """Configure the switch."""
        _ip(self.pid, *commands)

    def unplug(self, port: str) -> None:
        """Remove a port that is left of a host without power: the kernel takes its time."""
        inside = ["nsenter", f"--net=/proc/{self.pid}/ns/net", "ip", "link"]
        if subprocess.run([*inside, "show", port], capture_output=True, check=False).returncode:
            return
        # Fails if the kernel was faster.
        subprocess.run([*inside, "delete", port], capture_output=True, check=False)

    def close(self) -> None:
        self._holder.kill()
        self._holder.wait()
        for pipe in (self._holder.stdin, self._holder.stdout):
            if pipe is not None:
                pipe.close()


def _hardware(host: Host) -> str:
    return f"02:00:0a:4d:00:{host.index + 1:02x}"


def _ip(pid: int, *commands: str) -> None:
    """Run commands of `ip` in the network namespace of a process."""
    done = subprocess.run(
        ["nsenter", f"--net=/proc/{pid}/ns/net", "ip", "-batch", "-"],
        input="\n".join(commands) + "\n",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"ip: {done.stderr}{commands}"


@contextmanager
def hosts(
    *names: str,
    shared_memory_bytes: int = SHARED_MEMORY_BYTES,
    disk_bytes: Mapping[str, int] | None = None,
) -> Iterator[Network]:
    """Hosts with these names, while the block runs; iterates over them in this order.
    `disk_bytes` as in `Network`."""
    network = Network(names, shared_memory_bytes, disk_bytes)
    try:
        network.power_on()
        yield network
    finally:
        network.close()


def why_impossible() -> str:
    """Why simulated hosts cannot run on this machine; empty if they can."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"programs are missing: {', '.join(missing)} (apt-get install iproute2 util-linux)"
    try_out = (
        "mount -t tmpfs tmpfs /tmp && ip link add bridge type bridge && "
        "ip link add port0 type veth peer name port1"
    )
    command = ["unshare", *NAMESPACES, "--fork", "sh", "-c", try_out]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return ""
    return f"namespaces are not allowed here: {done.stderr.strip() or done.returncode}"
