"""`plexrl up`: its options, the settings that they and a file give, and the command."""
