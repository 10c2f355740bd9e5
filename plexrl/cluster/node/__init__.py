"""A node on another machine than the head: its processes, what it keeps, and how it leaves."""
