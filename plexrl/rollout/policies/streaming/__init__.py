"""Training on the finished part of a batch, on GPUs that the rollout does not need any more."""
