"""The scheduler: a pure core that decides, and a service shell around it."""
