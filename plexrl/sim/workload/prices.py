"""Prices of GPU-hours, and the billing of training nodes. Pure."""

import math
from dataclasses import dataclass

from plexrl.errors import InvalidRequestError

PRICE_MAX = 1e6
"""Highest price of a GPU-hour; a higher one is a mistake, such as a node's price per year."""
HORIZON_DAYS_MAX = 36_500.0
DAY_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Prices of GPU-hours, in one currency.

    Reserved nodes are paid for the whole horizon, used or not. On-demand nodes are paid while
    groups hold them.
    """

    reserved: float | None = None
    """Price of a GPU-hour of a reserved node; absent: the node type's price."""
    on_demand: float | None = None
    """Price of a GPU-hour of an on-demand node; absent: all nodes are reserved."""
    rollout: float | None = None
    """Price of a rollout GPU-hour; absent: the price of the job's node type."""
    reserved_nodes: int | None = None
    """Number of reserved nodes; absent: the number with the lowest cost (with an on-demand
    price)."""
    horizon_s: float | None = None
    """Paid time of reserved nodes; absent, or shorter than the drain time: the drain time."""

    def __post_init__(self) -> None:
        for name, price in (
            ("reserved", self.reserved),
            ("on-demand", self.on_demand),
            ("rollout", self.rollout),
        ):
            if price is not None and not 0.0 <= price <= PRICE_MAX:
                raise InvalidRequestError(
                    f"the {name} price of a GPU-hour is a number of 0 to {PRICE_MAX:,.0f}, not "
                    f"{price:g}"
                )
        if self.reserved_nodes is not None and self.reserved_nodes < 0:
            raise InvalidRequestError(
                f"reserved nodes are a whole number of at least 0, not {self.reserved_nodes}"
            )
        days = 1.0 if self.horizon_s is None else self.horizon_s / DAY_S
        if math.isnan(days) or not 0.0 < days <= HORIZON_DAYS_MAX:
            raise InvalidRequestError(
                f"a horizon is above 0 and at most {HORIZON_DAYS_MAX:,.0f} days, not {days:g}"
            )
