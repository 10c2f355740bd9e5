"""Graders: compare answers with what is expected, and run programs against test cases."""
