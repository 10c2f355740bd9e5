"""Loaders of public traces: column layouts and their detection by header."""

from plexrl.traces.formats.lengths import read_histogram
from plexrl.traces.formats.load import FORMATS, Format, Loaded, detect, load, unknown_layout

__all__ = ["FORMATS", "Format", "Loaded", "detect", "load", "read_histogram", "unknown_layout"]
