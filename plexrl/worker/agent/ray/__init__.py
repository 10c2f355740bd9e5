"""Node agents and workers as Ray actors."""
