"""What the core knows: records and state machines. Pure."""
