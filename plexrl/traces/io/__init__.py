"""Trace files: CSV, Parquet and JSON, read, checked and written as streams."""
