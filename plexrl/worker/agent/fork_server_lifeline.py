"""What the fork server imports first: it is the agent's child, and dies with it even while it is
still loading torch; its workers die with it."""

import os

from plexrl.process.lifeline import die_with_named_parent

die_with_named_parent(os.environ)

FORK_SERVER = os.getpid()
"""The process that imported this first; its forks find its number here."""
