"""Worker processes, their backends, and the node agent that starts them."""
