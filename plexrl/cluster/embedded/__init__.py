"""The cluster that `plexrl.connect` starts and that ends with the last script."""
