"""Joining: the cluster's certificate authority, and how a node becomes part of the cluster."""
