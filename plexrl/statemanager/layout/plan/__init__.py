"""Plans: which source sends which bytes of which tensor to which target. Pure."""
