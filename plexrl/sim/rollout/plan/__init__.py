"""Which way to run a job would pay, by simulation from its profile."""
