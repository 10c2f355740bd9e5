"""Who sends which bytes of which tensor to whom. Pure."""
