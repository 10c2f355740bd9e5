"""Admission: the order in which waiting deployments get GPUs. Pure."""
