"""The router: serves the HTTP API and executes admitted operations on workers."""
