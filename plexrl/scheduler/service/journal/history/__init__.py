"""The archive of the journal: what happened, for some days and within stated bytes."""
