"""The Tinker API: an unmodified `tinker` SDK trains and samples on the cluster."""
