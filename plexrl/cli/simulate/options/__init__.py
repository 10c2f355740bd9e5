"""The options of `plexrl simulate`: their groups, their checks, and the scenario they describe."""
