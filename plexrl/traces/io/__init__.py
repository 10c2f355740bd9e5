"""Trace files in CSV, Parquet and JSON: streaming reads, checks and writes."""
