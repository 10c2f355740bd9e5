"""The event loop of a run: virtual clock, jobs, controllers and injected faults."""
