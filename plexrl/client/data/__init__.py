"""Data of controllers: batches, results, demand traces, metrics."""
