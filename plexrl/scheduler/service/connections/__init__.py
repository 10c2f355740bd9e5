"""The scheduler's connections to routers and node agents: roles, calls, queues of commands."""
