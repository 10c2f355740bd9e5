"""Alembic's entry: runs the revisions on the connection that `plexrl.scheduler.journal.schema`
hands in."""

from alembic import context

# The caller's transaction holds the lock against other processes and commits all or nothing.
context.configure(connection=context.config.attributes["connection"])
context.run_migrations()
