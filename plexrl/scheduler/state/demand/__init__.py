"""What a deployment needs: its demand trace, and estimates of its durations."""
