"""Dispatch: the order of a group's members, context switches, slack. Pure."""
