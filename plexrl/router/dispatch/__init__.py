"""Splits a batch into each rank's input, and joins the ranks' results. Pure."""
