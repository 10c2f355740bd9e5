"""The device backend of nodes without GPUs, in host memory."""
