"""Tail batching: prompts with long responses share rounds. Tensor parallelism by round."""
