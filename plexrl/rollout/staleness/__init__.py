"""The staleness protocol: buffers by version, and the manager of groups over them."""
