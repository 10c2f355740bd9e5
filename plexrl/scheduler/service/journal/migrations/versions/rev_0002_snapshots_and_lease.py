"""Snapshots, and the lease of the scheduler that may write."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Create `snapshots` and `lease`, and mark the schema for versions older than the
    migrations."""
    strict = {"sqlite_strict": True}
    seconds: sa.Double[float] = sa.Double().with_variant(sa.REAL(), "sqlite")
    number = sa.BigInteger().with_variant(sa.INTEGER(), "sqlite")
    op.create_table(
        "snapshots",
        sa.Column("position", number, primary_key=True, autoincrement=False),
        sa.Column("at", seconds, nullable=False),
        sa.Column("digest", sa.Text, nullable=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
        **strict,
    )
    lease = op.create_table(
        "lease",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("holder", sa.Text, nullable=False),
        sa.Column("epoch", number, nullable=False),
        sa.Column("expires_at", seconds, nullable=False),
        **strict,
    )
    op.bulk_insert(lease, [{"name": "scheduler", "holder": "", "epoch": 0, "expires_at": 0.0}])
    op.execute("DELETE FROM meta WHERE name = 'schema'")
    op.execute("INSERT INTO meta (name, value) VALUES ('schema', '2')")
