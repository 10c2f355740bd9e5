"""Decisions about rewards: timeouts of tests, attempts of graders, what a failure means. Pure."""
