"""The journal's tables, and their migration to the schema of this version.

Versions older than the migrations read `meta.schema`; alembic stores its own revision.
"""

from pathlib import Path

import sqlalchemy as sa

from plexrl.errors import StorageError
from plexrl.scheduler.service.journal.database import Database

HEAD = "0003"
"""The newest revision in `migrations/versions`."""

LEASE = "scheduler"
"""Name of the one lease."""

_TABLES = sa.MetaData()

EVENTS = sa.Table(
    "events",
    _TABLES,
    sa.Column("position", sa.BigInteger, primary_key=True),
    sa.Column("at", sa.Double),
    sa.Column("body", sa.Text),
)
SNAPSHOTS = sa.Table(
    "snapshots",
    _TABLES,
    sa.Column("position", sa.BigInteger, primary_key=True),
    sa.Column("at", sa.Double),
    sa.Column("digest", sa.Text),
    sa.Column("body", sa.LargeBinary),
)
SET_ASIDE = sa.Table(
    "set_aside",
    _TABLES,
    sa.Column("position", sa.BigInteger, primary_key=True),
    sa.Column("step", sa.Text, primary_key=True),
    sa.Column("error", sa.Text),
)
LEASES = sa.Table(
    "lease",
    _TABLES,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("holder", sa.Text),
    sa.Column("epoch", sa.BigInteger),
    sa.Column("expires_at", sa.Double),
)


def migrate(database: Database, connection: sa.Connection) -> None:
    """Migrate the tables to this version's schema, inside the transaction of `connection`.

    Raises:
        StorageError: a newer version wrote the tables.
    """
    # The schema is mostly up to date, so the lock and alembic are avoided.
    found = _revision(connection)
    if found == HEAD:
        return
    database.lock_schema(connection)
    found = _revision(connection)
    if found == HEAD:
        return
    # A slow import that only the first start of a version needs.
    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    folder = Path(__file__).parent / "migrations"
    config.set_main_option("script_location", str(folder).replace("%", "%%"))
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    if found is not None and found not in known:
        raise StorageError(
            f"{database.name} has journal schema {found}; this version reads up to {HEAD}: use "
            "the version of PlexRL that wrote it, or another journal",
            path=database.name,
        )
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


def _revision(connection: sa.Connection) -> str | None:
    """The alembic revision of the database; None before the first migration."""
    tables = sa.inspect(connection).get_table_names()
    if "alembic_version" not in tables:
        if "meta" in tables:
            old = connection.exec_driver_sql("SELECT value FROM meta WHERE name = 'schema'")
            value = old.scalar()
            # The first revision accepts the tables of schema 1, which preceded the migrations.
            return None if value in (None, "1") else str(value)
        return None
    return connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar()
