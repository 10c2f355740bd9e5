"""A disk that loses what was not flushed: an ext4 file system of its own on a loop device.

`cut` shuts the file system down without a flush of its log, as a power cut does: names and contents
that no `fsync` had reached are gone when it is mounted again. Nothing but this file system is ever
shut down.
"""

import fcntl
import os
import shutil
import struct
import subprocess
import time
from pathlib import Path

SHUTDOWN = 0x8004587D
"""`EXT4_IOC_SHUTDOWN`: `_IOR('X', 125, __u32)`."""
NO_LOG_FLUSH = 2
COMMIT_S = 300
"""Period of ext4's own commits: without it, five seconds, nearly everything old is durable."""
GONE_S = 60.0
PROGRAMS = ("losetup", "mkfs.ext4", "mount", "umount", "fsfreeze")


class LoopDisk:
    """A file system in the file `image`, mounted at `folder`."""

    def __init__(self, folder: Path, image: Path, nbytes: int) -> None:
        """Makes the file system and mounts it."""
        self.folder = folder
        self._image = image
        with image.open("wb") as file:
            file.truncate(nbytes)
        _run("mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0", str(image))
        folder.mkdir(exist_ok=True)
        self.mount()

    def mount(self) -> None:
        """Mount it, which replays its log; the loop device goes with the mount."""
        assert not os.path.ismount(self.folder), f"{self.folder} is mounted"
        options = f"loop,commit={COMMIT_S}"
        _run("mount", "-t", "ext4", "-o", options, str(self._image), str(self.folder))

    def flush(self) -> None:
        """Make everything durable that a test has prepared."""
        _run("sync", "-f", str(self.folder))

    def cut(self) -> None:
        """Lose what was not flushed, and unmount. No process may run on it any more."""
        # A shutdown of the file system below would be one of this machine.
        assert os.path.ismount(self.folder), f"{self.folder} is not mounted"
        assert self.folder.stat().st_dev != self.folder.parent.stat().st_dev
        descriptor = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.ioctl(descriptor, SHUTDOWN, struct.pack("I", NO_LOG_FLUSH))
        finally:
            os.close(descriptor)
        self.unmount()

    def freeze(self) -> None:
        """Stall whoever writes, until `thaw`; reads are answered, as by a network file system that
        has cached what is read."""
        _run("fsfreeze", "-f", str(self.folder))

    def thaw(self) -> None:
        """End a freeze; what was stalled goes on."""
        _run("fsfreeze", "-u", str(self.folder))

    def unmount(self) -> None:
        """Unmount it, and wait until the kernel has let go of it."""
        if os.path.ismount(self.folder):
            _run("umount", str(self.folder))
        deadline = time.monotonic() + GONE_S
        # Two mounts of one image would damage it.
        while _run("losetup", "-j", str(self._image)):
            assert time.monotonic() < deadline, f"{self._image} is still in use"
            time.sleep(0.02)


def unmount_all(folder: Path) -> None:
    """Unmount the disks below the folder of a killed run; their loop devices go with them."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        path = line.split()[4]
        if path.startswith(f"{folder}/"):
            subprocess.run(["umount", "-l", path], check=False, capture_output=True)


def why_no_loop_disk(folder: Path) -> str:
    """Why there can be no such disk on this machine; empty if there can."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"programs are missing: {', '.join(missing)}"
    if os.geteuid() != 0:
        return "only root can mount a disk on a loop device"
    try:
        disk = LoopDisk(folder / "disk", folder / "image", 16 << 20)
    except subprocess.CalledProcessError as error:
        return f"no disk on a loop device can be mounted: {error.stderr.decode().strip()}"
    try:
        disk.cut()
    except OSError as error:
        return f"the file system cannot be shut down: {error}"
    finally:
        disk.unmount()
    return ""


def _run(*words: str) -> bytes:
    return subprocess.run(words, check=True, capture_output=True).stdout
