"""Steps of events that failed and that every replay skips."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Create `set_aside`."""
    number = sa.BigInteger().with_variant(sa.INTEGER(), "sqlite")
    op.create_table(
        "set_aside",
        sa.Column("position", number, primary_key=True, autoincrement=False),
        sa.Column("step", sa.Text, primary_key=True),
        sa.Column("error", sa.Text, nullable=False),
        sqlite_strict=True,
    )
