"""Alembic's entry point: runs the revisions on the connection of
`plexrl.scheduler.service.journal.schema`."""

from alembic import context

# The caller's transaction holds the lock against other processes and commits all or nothing.
context.configure(connection=context.config.attributes["connection"])
context.run_migrations()
