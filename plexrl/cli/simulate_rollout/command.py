"""`plexrl simulate-rollout`: compares ways to overlap rollout and training."""

from plexrl.cli.simulate_rollout.options import (
    ResponseOptions,
    RolloutClusterOptions,
    RolloutRunOptions,
    SystemOptions,
    settings,
    systems,
)
from plexrl.cli.terminal.context import Json
from plexrl.cli.terminal.option_groups import with_option_groups


@with_option_groups
def simulate_rollout(
    responses: ResponseOptions,
    cluster: RolloutClusterOptions,
    options: SystemOptions,
    running: RolloutRunOptions,
    as_json: Json = False,
) -> None:
    """Simulate rollout and training of one job: synchronous, asynchronous, under a staleness
    bound."""
    from plexrl.cli.simulate.output import check_folder
    from plexrl.cli.simulate_rollout.output import output
    from plexrl.cli.simulate_rollout.progress import run_all

    asked = settings(responses, cluster, running)
    compared = systems(options, cluster.rollout_gpus)
    if running.out is not None:
        check_folder(running.out)
    found, histories = run_all(
        asked,
        compared,
        workers=running.workers,
        with_histories=running.out is not None,
        quiet=as_json,
    )
    output(asked, found, histories, running.out, as_json=as_json)
