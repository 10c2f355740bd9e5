"""Code that all PlexRL processes share: start-up, children, folders, safe text, a sandbox."""
