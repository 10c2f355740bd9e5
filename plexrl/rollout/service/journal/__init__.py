"""The journal of one asynchronous rollout: what is durable, and what follows from it. I/O."""
