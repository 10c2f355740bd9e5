"""Events and commands of the core, and its timers."""
