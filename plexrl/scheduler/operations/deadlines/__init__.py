"""Early ends: cancellation, deadlines that users set, and bounds of what runs on workers."""
