"""Events. Files of before the migrations have these tables already and keep what is in them."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Make `meta` and `events` where they do not exist."""
    strict = {"sqlite_strict": True}
    op.create_table(
        "meta",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("value", sa.Text, nullable=False),
        if_not_exists=True,
        **strict,
    )
    # Two names for one type: SQLite's strict tables know only their own.
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
