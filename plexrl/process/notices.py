"""Lines for whoever sits at the terminal, which programs that read the output do not get."""

import logging
import sys

from plexrl.process.plain_text import many_lines


def tell(logger: logging.Logger, text: str) -> None:
    """Log `text` as INFO. Where nobody listens to that, a terminal gets it on standard error."""
    if logger.isEnabledFor(logging.INFO):
        logger.info("%s", text)
    elif sys.stderr is not None and sys.stderr.isatty():
        sys.stderr.write(f"plexrl: {many_lines(text)}\n")
        sys.stderr.flush()
