"""What the fork server imports first: it is the agent's child, and dies with it even while it is
still loading torch; its workers die with it."""

import os

from plexrl.cluster.lifeline import PARENT, die_with_parent, named_parent

die_with_parent(parent=named_parent(os.environ))
# Not for what its forks start.
os.environ.pop(PARENT, None)

FORK_SERVER = os.getpid()
"""The process that imported this first; its forks find its number here."""
