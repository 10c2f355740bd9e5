"""Which bytes of which tensor lie where. Pure."""
