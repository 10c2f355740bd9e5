"""What controllers send and receive: batches, results, demand, metrics."""
