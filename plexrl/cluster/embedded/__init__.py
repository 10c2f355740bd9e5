"""The cluster that `plexrl.connect` starts by itself and that ends with its last script."""
