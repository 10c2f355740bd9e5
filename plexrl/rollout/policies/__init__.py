"""Mechanisms of the papers: how rollouts are batched, ranked, streamed and laid out."""
