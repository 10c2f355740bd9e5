"""Imported first by the fork server, so that it dies with the agent, even while it loads torch.

The fork server is the agent's child. Its workers die with it.
"""

import os

from plexrl.process.children.lifeline import die_with_named_parent

die_with_named_parent(os.environ)

FORK_SERVER = os.getpid()
"""Process id of the fork server, for its forks: the process that imported this module first."""
