"""Modules that the fork server of workers imports before its first fork."""
