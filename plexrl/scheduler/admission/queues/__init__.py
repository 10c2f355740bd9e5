"""Deployments that wait for GPUs. Pure."""
