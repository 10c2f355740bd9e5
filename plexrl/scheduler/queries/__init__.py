"""Answers to questions; they change nothing. Pure."""
