"""What an operator's page shows of the whole cluster."""
