"""Tail batching: prompts with long responses share rounds; sizes of tensor-parallel groups by round."""
