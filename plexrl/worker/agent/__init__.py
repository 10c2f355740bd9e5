"""The node agent: starts, watches and stops worker processes."""
