"""Device memory that workers and the StateManager share: backends, arenas, frozen weights."""
