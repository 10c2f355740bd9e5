"""Which versions a node holds, and where."""
