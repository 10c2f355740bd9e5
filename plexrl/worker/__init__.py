"""Worker processes, the backends they wrap, and the node agent that starts them."""
