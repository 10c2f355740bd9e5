"""Runs untrusted programs: bubblewrap, a system call filter, limits. I/O."""
