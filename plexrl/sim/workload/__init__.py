"""What is simulated: scenarios, traces, cycles, policies."""
