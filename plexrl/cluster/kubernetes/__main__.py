"""The entry point of the chart's pods: `python -m plexrl.cluster.kubernetes COMMAND`.

keys: make the cluster's Secrets. issuer: issue certificates. certificate: keep a pod's certificate.
settings: fill a pod's settings. scheduler: a scheduler with standbys. node: StateManager and agent.
operator: run RLJobs and follow cordons.
"""

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

from plexrl.errors import InvalidRequestError, PlexRLError
from plexrl.process.children.startup import ending_signals, set_up_process

LOG = logging.getLogger(__name__)


def main() -> None:
    """Run one command until SIGTERM."""
    parser = argparse.ArgumentParser(
        prog="python -m plexrl.cluster.kubernetes", description=__doc__
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (add_arguments, _) in COMMANDS.items():
        add_arguments(commands.add_parser(name))
    options = parser.parse_args()
    set_up_process()
    # Every request would be a line.
    for noisy in ("httpx", "kubernetes"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    try:
        status = COMMANDS[options.command][1](options)
    except PlexRLError as error:
        LOG.critical("%s", error)
        status = 1
    sys.exit(status)


def _stop_event() -> threading.Event:
    stop = threading.Event()
    for each in ending_signals():
        signal.signal(each, lambda *_: stop.set())
    return stop


def _keys_arguments(parser: argparse.ArgumentParser) -> None:
    for name in ("--namespace", "--keys", "--authority", "--certificate"):
        parser.add_argument(name, required=True)


def _keys(options: argparse.Namespace) -> int:
    from plexrl.cluster.kubernetes.api import connect
    from plexrl.cluster.kubernetes.certificates.keys import make_keys

    make_keys(
        connect(),
        options.namespace,
        keys=options.keys,
        authority=options.authority,
        certificate=options.certificate,
    )
    return 0


def _issuer_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--authority", type=Path, required=True, help="folder of ca.pem and ca.key")
    parser.add_argument("--listen", default="0.0.0.0:7443")
    parser.add_argument("--host", action="append", required=True, help="name that clients use")
    parser.add_argument("--role", action="append", default=[], help="ROLE=NAMESPACE/ACCOUNT")
    parser.add_argument("--hours", type=float, default=24.0)


def _issuer(options: argparse.Namespace) -> int:
    from plexrl.cluster.join.authority import Authority
    from plexrl.cluster.kubernetes.api import connect
    from plexrl.cluster.kubernetes.certificates.issuer import Issuer, IssuerServer
    from plexrl.wire.links.credentials import Role

    roles: dict[str, Role] = {}
    for each in options.role:
        role, _, account = each.partition("=")
        try:
            roles[account] = Role(role)
        except ValueError as error:
            raise InvalidRequestError(f"--role {each}: {role!r} is no role") from error
    host, _, port = options.listen.rpartition(":")
    issuer = Issuer(
        connect(), Authority.open(options.authority), roles, timedelta(hours=options.hours)
    )
    server = IssuerServer(issuer, host, int(port), options.host)
    server.start()
    LOG.info("issues certificates at port %d", server.port)
    _stop_event().wait()
    server.close()
    return 0


def _certificate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--issuer", required=True, help="its URL")
    parser.add_argument("--identity", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)


def _certificate(options: argparse.Namespace) -> int:
    from plexrl.cluster.kubernetes.certificates.renewal import Renewal

    Renewal(options.issuer, options.identity, options.folder).keep(_stop_event())
    return 0


def _settings_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--from", dest="source", type=Path, required=True)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--node", action="store_true", help="read the labels of this pod's node")
    parser.add_argument("--secret", action="append", default=[], help="NAME=FILE to copy")


def _settings(options: argparse.Namespace) -> int:
    from plexrl.cluster.kubernetes.settings import (
        copy_secret,
        node_labels,
        with_host,
        write_settings,
    )

    environment = with_host(os.environ)
    labels = node_labels(environment["NODE"]) if options.node else {}
    write_settings(options.source, options.to, environment, labels)
    for each in options.secret:
        name, _, source = each.partition("=")
        copy_secret(Path(source), options.to / name)
    return 0


def _scheduler_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, required=True)
    for name in ("--namespace", "--pod", "--lease", "--selector"):
        parser.add_argument(name, required=True)
    parser.add_argument("--port", type=int, default=7070)


def _scheduler(options: argparse.Namespace) -> int:
    from plexrl.cluster.kubernetes.api import connect
    from plexrl.cluster.kubernetes.leader import LeaderLabel, listens, run_scheduler_pod

    label = LeaderLabel(connect(), options.namespace, options.pod, options.lease, options.selector)

    async def serve() -> int:
        stop = _asyncio_stop()
        return await run_scheduler_pod(options.config, label, lambda: listens(options.port), stop)

    return asyncio.run(serve())


def _node_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, required=True)


def _node(options: argparse.Namespace) -> int:
    from plexrl.cluster.kubernetes.node import run_node

    settings = json.loads(options.config.read_text())

    async def serve() -> int:
        return await run_node(settings, _asyncio_stop())

    return asyncio.run(serve())


def _asyncio_stop() -> asyncio.Event:
    stop = asyncio.Event()
    for each in ending_signals():
        asyncio.get_running_loop().add_signal_handler(each, stop.set)
    return stop


def _operator_arguments(parser: argparse.ArgumentParser) -> None:
    for name in ("--url", "--namespace", "--identity", "--lease", "--image"):
        parser.add_argument(name, required=True)
    parser.add_argument("--watch", action="append", required=True, help="namespace of RLJobs")
    parser.add_argument("--resync", type=float, default=30.0, help="seconds")
    parser.add_argument("--drained-nodes", help="ConfigMap; absent: cordons are not followed")
    parser.add_argument("--health-port", type=int, default=8081)
    parser.add_argument("--lease-seconds", type=float, default=15.0)


def _operator(options: argparse.Namespace) -> int:
    from plexrl.client.blocking.cluster import connect as connect_cluster
    from plexrl.cluster.kubernetes.api import connect
    from plexrl.cluster.kubernetes.lease import KubernetesLease
    from plexrl.cluster.kubernetes.operator.controller import OperatorController
    from plexrl.cluster.kubernetes.operator.cordon import CordonFollower
    from plexrl.cluster.kubernetes.operator.jobs import ClusterJobs
    from plexrl.cluster.kubernetes.operator.reconcile import Reconciler
    from plexrl.cluster.kubernetes.operator.run import EXIT_LEASE_LOST, OperatorHealth, lead

    api, stop = connect(), _stop_event()
    jobs = ClusterJobs(connect_cluster(options.url))
    controller = OperatorController(
        api,
        Reconciler(api, jobs, url=options.url, image=options.image),
        options.watch,
        options.resync,
    )
    works: list[Callable[[threading.Event], None]] = [controller.run]
    checks: list[Callable[[], bool]] = [lambda: controller.is_healthy]
    if options.drained_nodes:
        follower = CordonFollower(
            api, jobs, options.namespace, options.drained_nodes, options.resync
        )
        works.append(follower.run)
        checks.append(lambda: follower.is_healthy)
    lease = KubernetesLease(
        api, options.namespace, options.lease, options.identity, options.lease_seconds
    )
    with ExitStack() as open_parts:
        # A standby has nothing that could be stuck.
        health = OperatorHealth(
            options.health_port, lambda: not lease.is_held or all(check() for check in checks)
        )
        open_parts.callback(health.close)
        if lead(lease, works, stop):
            os._exit(EXIT_LEASE_LOST)
    return 0


COMMANDS: dict[
    str,
    tuple[Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]],
] = {
    "keys": (_keys_arguments, _keys),
    "issuer": (_issuer_arguments, _issuer),
    "certificate": (_certificate_arguments, _certificate),
    "settings": (_settings_arguments, _settings),
    "scheduler": (_scheduler_arguments, _scheduler),
    "node": (_node_arguments, _node),
    "operator": (_operator_arguments, _operator),
}


if __name__ == "__main__":
    main()
