"""What the SDK shows to people: reprs, progress, traces, commands to copy."""
