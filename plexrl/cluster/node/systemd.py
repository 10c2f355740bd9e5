"""A systemd unit for a node that has joined."""

import getpass
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

UNIT = """\
# A node of a PlexRL cluster. It has joined: its certificate is in {data_dir}.
[Unit]
Description=PlexRL node
After=network-online.target local-fs.target
Wants=network-online.target
RequiresMountsFor={data_dir}
StartLimitIntervalSec=0

[Service]
Type=exec
User={user}
ExecStart={command}
# A node that was asked to end, as by `plexrl node leave`, exits with 0 and stays away.
Restart=on-failure
RestartSec=2
# At a stop the StateManager writes the host tier to disk.
TimeoutStopSec=15min
KillMode=mixed
# One descriptor per memory segment and per client; host memory is pinned for GPUs.
LimitNOFILE=1048576
LimitMEMLOCK=infinity
NoNewPrivileges=yes
ProtectSystem=strict
ReadWritePaths={data_dir} /dev/shm /tmp
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK

[Install]
WantedBy=multi-user.target
"""


def unit_text(data_dir: Path, arguments: Sequence[str]) -> str:
    """The unit that runs `plexrl node join` with these arguments."""
    program = Path(sys.executable).with_name("plexrl")
    words = [str(program), "node", "join", *arguments]
    if "--data-dir" not in arguments:
        words += ["--data-dir", str(data_dir)]
    # A percent sign begins a specifier of systemd.
    command = shlex.join(words).replace("%", "%%")
    folder = str(data_dir).replace("%", "%%")
    quoted = f'"{folder}"' if " " in folder else folder
    return UNIT.format(data_dir=quoted, user=getpass.getuser(), command=command)
