"""`python -m plexrl` is the command `plexrl`, where that is not on the path of programs."""

from plexrl.cli.app import main

main()
