"""The `vllm` rollout backend: vLLM's engine in the worker's process, on the arena's weights.

Nothing is imported here: `installation` must say what is missing where vLLM is not installed.
"""
