"""The rollout service: coordinators of asynchronous rollouts, and their stores. I/O."""
