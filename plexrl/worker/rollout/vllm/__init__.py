"""The `vllm` rollout backend: vLLM's engine in the worker's process, on the arena's weights.

Nothing is imported here, so that `installation` can report that vLLM is not installed.
"""
