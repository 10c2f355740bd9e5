"""One rollout instance: latencies, and continuous batching in a bounded KV cache."""
