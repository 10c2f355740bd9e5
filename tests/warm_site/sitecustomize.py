"""Imported by Python in each process that tests start, before anything else.

A fork server of workers would load torch, which takes five seconds. It asks `tests/warm_forks.py`
for a process that has loaded it, gives it its descriptors, and lives as long as that process.
"""

import os
import sys

_COMMAND = "from multiprocessing.forkserver import main; main("


def _ask(command: str) -> None:
    """Have a warm process run the command, and end with it. Returns if no process offers this."""
    import json
    import re
    import resource
    import socket

    name, *namespaces = os.environ["PLEXRL_TEST_FORKS"].split()
    # Python imports this each time it starts, so it uses os alone as far as it can.
    own = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("mnt", "pid", "user")]  # noqa: PTH115
    if namespaces != own:
        return
    read = re.fullmatch(r"main\((\d+), (\d+), (\[.*\]), \*\*(\{.*\})\)", command.split("; ")[1])
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if read is None or connection.connect_ex(f"\0{name}"):
        return
    limits = [
        (number, resource.getrlimit(number))
        for number in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_AS)
    ]
    order = {
        "preload": read[3],
        "prepared": read[4],
        "env": dict(os.environ),
        "cwd": os.getcwd(),  # noqa: PTH109
        "limits": limits,
    }
    descriptors = [int(read[1]), int(read[2]), 0, 1, 2]
    socket.send_fds(connection, [json.dumps(order).encode()], descriptors)
    for descriptor in descriptors[:2]:
        os.close(descriptor)
    # The end of the warm process closes the connection.
    connection.recv(1)
    os._exit(0)


if "PLEXRL_TEST_FORKS" in os.environ:
    for _word in sys.orig_argv:
        if _word.startswith(_COMMAND) and "plexrl.worker.agent.fork_server.lifeline" in _word:
            _ask(_word)
