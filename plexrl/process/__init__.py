"""What every PlexRL process does alike: start-up, children, private folders, terminal-safe text."""
