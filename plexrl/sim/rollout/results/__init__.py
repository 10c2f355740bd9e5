"""Results of runs: histories, figures, gains."""
