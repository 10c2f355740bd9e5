"""The scheduler's five state machines, each as a table. Pure."""
