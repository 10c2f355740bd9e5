"""Datagrams between hosts: whether one arrives tells whether a link works."""

from tests.hosts.host import Host, HostProcess

PORT = 5000
RECEIVER = f"""
import socket
receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
receiver.bind(("", {PORT}))
print("bound", flush=True)
while True:
    print("got", receiver.recv(100).decode(), flush=True)
"""
SENDER = f"""
import socket, sys
socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(sys.argv[2].encode(), (sys.argv[1], {PORT}))
"""


def receive(host: Host) -> HostProcess:
    """A process that prints each datagram that the host gets: `got TEXT`."""
    process = host.start("python", "-I", "-S", "-c", RECEIVER)
    process.wait_for("bound")
    return process


def send(sender: Host, receiver: Host, text: str) -> None:
    """Send one datagram, which may be lost."""
    sender.run("python", "-I", "-S", "-c", SENDER, receiver.name, text)
