"""Memory of the host tier that is allocated before it is needed, in the background."""
