"""The filter of system calls: what the kernel offers beyond the needs of a program that computes.

Namespaces and limits contain the program. The filter keeps it from parts of the kernel where faults
have broken such containment, and from memory that no limit counts.
"""

import errno
import os
import tempfile

from plexrl.errors import SandboxError

DENIED = (
    # Processes: their memory, and observation of the kernel.
    *("ptrace", "process_vm_readv", "process_vm_writev", "process_madvise", "kcmp", "pidfd_getfd"),
    *("perf_event_open", "bpf", "userfaultfd", "syslog", "lookup_dcookie"),
    # Namespaces, mounts and file handles.
    *("unshare", "setns", "mount", "umount2", "pivot_root", "chroot", "move_mount", "open_tree"),
    *("fsopen", "fsconfig", "fsmount", "fspick", "mount_setattr", "name_to_handle_at"),
    *("open_by_handle_at", "quotactl", "quotactl_fd", "fanotify_init"),
    # Keys are not in a namespace.
    *("add_key", "request_key", "keyctl"),
    # The machine.
    *("acct", "swapon", "swapoff", "reboot", "kexec_load", "kexec_file_load", "init_module"),
    *("finit_module", "delete_module", "settimeofday", "clock_settime", "adjtimex"),
    *("clock_adjtime", "iopl", "ioperm", "vhangup", "sethostname", "setdomainname"),
    # Memory that limits of address space and files do not count.
    *("memfd_secret", "shmget", "shmat", "shmctl", "msgget", "msgsnd", "semget", "mq_open"),
    *("vmsplice", "mbind", "migrate_pages", "move_pages", "set_mempolicy"),
)
ABSENT = ("clone3", "memfd_create", "io_uring_setup", "io_uring_enter", "io_uring_register")
"""Programs have another way if these do not exist. Flags of `clone3` cannot be seen by a filter."""
FAMILIES = (1, 2, 10)
"""Sockets: Unix, IPv4, IPv6. These belong to the network namespace; AF_VSOCK, say, does not."""
FAMILY_MAX = 10
NAMESPACES = 0x7E020080
"""Flags of `clone` that make a namespace."""


def compile_filter() -> bytes:
    """The filter for bubblewrap.

    Raises:
        SandboxError: libseccomp or its binding is not installed.
    """
    try:
        import pyseccomp as seccomp
    except (ImportError, RuntimeError) as error:
        raise SandboxError(
            f"the sandbox needs libseccomp ({error}): pip install 'plexrl[rewards]', and install "
            "the package libseccomp2 of the distribution (libseccomp on Fedora)"
        ) from error
    made = seccomp.SyscallFilter(seccomp.ALLOW)
    refused, absent = seccomp.ERRNO(errno.EPERM), seccomp.ERRNO(errno.ENOSYS)
    for names, action in ((DENIED, refused), (ABSENT, absent)):
        for name in names:
            number = seccomp.resolve_syscall(seccomp.Arch.NATIVE, name)
            # Negative: this processor, or an older libseccomp, does not have it.
            if number >= 0:
                made.add_rule(action, number)
    for flag in (1 << bit for bit in range(32) if NAMESPACES >> bit & 1):
        made.add_rule(refused, "clone", seccomp.Arg(0, seccomp.MASKED_EQ, flag, flag))
    families = set(range(FAMILY_MAX + 1)) - set(FAMILIES)
    for family in sorted(families):
        made.add_rule(refused, "socket", seccomp.Arg(0, seccomp.EQ, family))
    made.add_rule(refused, "socket", seccomp.Arg(0, seccomp.GT, FAMILY_MAX))
    with tempfile.TemporaryFile() as file:
        made.export_bpf(file)
        file.seek(0, os.SEEK_SET)
        return file.read()
