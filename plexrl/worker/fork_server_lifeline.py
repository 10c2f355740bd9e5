"""What the fork server imports first: it is the agent's child, and dies with it even while it is
still loading torch; its workers die with it."""

from plexrl.cluster.lifeline import die_with_parent

die_with_parent()
