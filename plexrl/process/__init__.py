"""Code that all PlexRL processes share: start-up, children, private folders, terminal-safe text, a sandbox."""
