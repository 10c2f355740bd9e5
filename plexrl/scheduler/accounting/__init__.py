"""What tenants hold, use and may use, and what measurements say of their work. Pure."""
