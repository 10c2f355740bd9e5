"""Jobs that never share GPUs, under the rules of batch systems: baselines of the policies."""
