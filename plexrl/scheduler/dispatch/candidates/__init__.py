"""The members that compete for a group: what each could run, and the shares of their tenants."""
