"""The files of jobs on the shared disk: access to and quotas of checkpoints, and metrics."""
