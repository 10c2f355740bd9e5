"""GPUs, by CUDA's virtual memory management."""
