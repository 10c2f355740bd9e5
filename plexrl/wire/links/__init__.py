"""Links between processes: addresses, certificates, connecting and serving, with or without TLS."""
