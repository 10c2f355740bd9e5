"""Rewards in the controller: graders, a sandbox for untrusted programs, concurrent grading."""
