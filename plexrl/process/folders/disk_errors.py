"""Errors of disks and mounts that an operator can mend: they are held, like a full disk."""

import errno

NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Values of `errno` that mean `StorageFullError`."""

FAILING = frozenset({errno.EROFS, errno.EIO, errno.ESTALE})
"""Values of `errno` of a disk that fails, whatever was done with it."""

AWAY = FAILING | {
    *(errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENODEV, errno.ENXIO),
    *(errno.ENOTCONN, errno.ETIMEDOUT, errno.EHOSTDOWN),
}
"""Values of `errno` of a write to a file of the cluster's own that mean `StorageUnavailableError`:
the disk fails, a mount is missing, or its owner was changed."""
