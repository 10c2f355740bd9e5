"""Messages for a user at a terminal; programs that read the output do not get them."""

import logging
import sys

from plexrl.process.plain_text import many_lines


def notify_user(logger: logging.Logger, text: str) -> None:
    """Log `text` as INFO. If that level is disabled and standard error is a terminal, write it
    there."""
    if logger.isEnabledFor(logging.INFO):
        logger.info("%s", text)
    elif sys.stderr is not None and sys.stderr.isatty():
        sys.stderr.write(f"plexrl: {many_lines(text)}\n")
        sys.stderr.flush()
