"""`plexrl dashboard`: the operator's page of a journal on disk, or of a demo cluster."""

from pathlib import Path
from typing import Annotated

import typer

from plexrl.cli.terminal.context import write_text
from plexrl.errors import InvalidRequestError
from plexrl.limits import check_numbers


def dashboard(
    journal: Annotated[
        Path | None,
        typer.Option("--from", help="A journal's file, or a data directory. It is not changed."),
    ] = None,
    demo: Annotated[bool, typer.Option("--demo", help="Show a busy cluster, simulated.")] = False,
    port: Annotated[int, typer.Option(help="Port on this machine; 0: a free one.")] = 0,
) -> None:
    """Serve the operator's page without a cluster, to this machine only, until Ctrl-C.

    A running cluster has its own page: `plexrl up` prints its address."""
    if (journal is None) == (not demo):
        raise InvalidRequestError("name a journal with --from, or use --demo")
    check_numbers("plexrl dashboard", {"port": port})
    _serve(journal, port)


def _serve(journal: Path | None, port: int) -> None:
    import asyncio
    import signal
    import sys
    import tempfile

    from plexrl.cluster.stored_page import serve_page, state_of_demo, state_of_journal

    async def run(folder: Path) -> None:
        stop = asyncio.Event()
        for sign in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(sign, stop.set)
        state = state_of_demo(folder) if journal is None else state_of_journal(journal, folder)

        def ready(address: str) -> None:
            write_text(f"{state.label}\n  page:  {address}\n  key:   {state.key}\n")
            sys.stdout.flush()

        await serve_page(state, folder, port, ready, stop)

    with tempfile.TemporaryDirectory(prefix="plexrl-page-") as folder:
        asyncio.run(run(Path(folder)))
