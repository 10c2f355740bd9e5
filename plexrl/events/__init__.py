"""What a cluster tells an MQTT broker: states of jobs, nodes and groups, and prefetch hints."""
