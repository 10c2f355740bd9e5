"""The node agent, which starts, watches and stops worker processes."""
