"""Free capacity: planned busy slots of groups, free GPUs, memory, micro-shifts. Pure."""
