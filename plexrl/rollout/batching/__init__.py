"""Tail batching: prompts with long responses wait, and share rounds of their own."""
