"""The journal's tables, and their migration to the schema this version knows.

`meta.schema` is what versions of before the migrations look at; alembic keeps its own mark.
"""

from pathlib import Path

import sqlalchemy as sa

from plexrl.errors import StorageError
from plexrl.scheduler.journal.database import Database

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
    """Bring the tables to this version's schema, inside the transaction of `connection`.

    Raises:
        StorageError: they are of a newer version.
    """
    # Read first: to be up to date is the usual case, and the lock and alembic cost time.
    found = _revision(connection)
    if found == HEAD:
        return
    database.lock_schema(connection)
    found = _revision(connection)
    if found == HEAD:
        return
    # Takes a while to import, and only the first start of a version needs it.
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
    """What alembic left in the database; None before the first migration."""
    tables = sa.inspect(connection).get_table_names()
    if "alembic_version" not in tables:
        if "meta" in tables:
            old = connection.exec_driver_sql("SELECT value FROM meta WHERE name = 'schema'")
            value = old.scalar()
            # Schema 1 of before the migrations is what the first revision finds in place.
            return None if value in (None, "1") else str(value)
        return None
    return connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar()
