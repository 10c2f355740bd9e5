"""The operator: runs RLJobs, and drains the nodes that are cordoned."""
