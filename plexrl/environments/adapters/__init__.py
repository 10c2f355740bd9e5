"""Other libraries as environments and sources of tasks."""
