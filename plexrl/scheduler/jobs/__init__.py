"""Jobs, their controllers and tenants, their profiles and their usage. Pure."""
