"""Systems without PlexRL's coordinator: synchronous, one step ahead, a limit in flight."""
