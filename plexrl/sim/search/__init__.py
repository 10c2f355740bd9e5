"""Many runs: sweeps, what-ifs and the smallest cluster for given objectives."""
