"""Events. Journals older than the migrations have these tables already and keep their rows."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Create `meta` and `events` unless they exist."""
    strict = {"sqlite_strict": True}
    op.create_table(
        "meta",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("value", sa.Text, nullable=False),
        if_not_exists=True,
        **strict,
    )
    # SQLite's strict tables accept their own type names only.
    at: sa.Double[float] = sa.Double().with_variant(sa.REAL(), "sqlite")
    position = sa.BigInteger().with_variant(sa.INTEGER(), "sqlite")
    op.create_table(
        "events",
        sa.Column("position", position, primary_key=True, autoincrement=False),
        sa.Column("at", at, nullable=False),
        sa.Column("body", sa.Text, nullable=False),
        if_not_exists=True,
        **strict,
    )
