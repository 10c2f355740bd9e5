"""In place of kube-proxy and of the cluster's DNS: the way from a Service to its pods."""

import signal
import subprocess
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kubernetes.client import ApiClient

CHAIN = "SERVICES"
DOMAIN = "cluster.local"
POLL_S = 0.3


class Services:
    """Follows the Services of all namespaces: rules of iptables and names of dnsmasq."""

    def __init__(self, api: "ApiClient", folder: Path, address: str) -> None:
        from kubernetes.client import CoreV1Api, DiscoveryV1Api

        self._core, self._slices = CoreV1Api(api), DiscoveryV1Api(api)
        self._names = folder / "names"
        self._names.write_text("")
        self._last: tuple[str, str] | None = None
        for hook in ("PREROUTING", "OUTPUT"):
            _iptables("-N", CHAIN, check=False)
            _iptables("-A", hook, "-j", CHAIN)
        command = ["dnsmasq", "--keep-in-foreground", f"--listen-address={address}", "--user=root"]
        command += ["--bind-interfaces", "--no-resolv", "--no-hosts", "--local=/#/"]
        command += [f"--addn-hosts={self._names}", f"--pid-file={folder / 'dnsmasq.pid'}"]
        self._dns = subprocess.Popen(command)

    def follow(self, stop: threading.Event) -> None:
        """Keep both as the API server says, until `stop`."""
        while not stop.wait(POLL_S):
            services = self._core.list_service_for_all_namespaces().items
            slices = self._slices.list_endpoint_slice_for_all_namespaces().items
            now = (_rules(services, slices), _names(services))
            if now == self._last:
                continue
            self._last = now
            rules, names = now
            subprocess.run(["iptables-restore", "--noflush"], input=rules, text=True, check=True)
            self._names.write_text(names)
            self._dns.send_signal(signal.SIGHUP)
        self._dns.terminate()
        self._dns.wait()


def _names(services: list[Any]) -> str:
    return "".join(
        f"{each.spec.cluster_ip} {each.metadata.name}.{each.metadata.namespace}.svc.{DOMAIN}\n"
        for each in services
    )


def _rules(services: list[Any], slices: list[Any]) -> str:
    lines = []
    for service in services:
        for port in service.spec.ports:
            targets = sorted(_targets(service, port.name, slices))
            for index, target in enumerate(targets):
                share = ["-m", "statistic", "--mode", "random", "--probability"]
                share.append(f"{1 / (len(targets) - index):.6f}")
                words = ["-A", CHAIN, "-d", f"{service.spec.cluster_ip}/32", "-p", "tcp"]
                words += ["--dport", str(port.port), *share, "-j", "DNAT"]
                lines.append(" ".join([*words, "--to-destination", target]))
    return "\n".join(["*nat", f":{CHAIN} - [0:0]", *lines, "COMMIT", ""])


def _targets(service: Any, port: str | None, slices: list[Any]) -> set[str]:
    """Ready endpoints of a Service's port, as `address:port`."""
    meta = service.metadata
    return {
        f"{address}:{each.port}"
        for found in slices
        if found.metadata.namespace == meta.namespace
        and found.metadata.labels.get("kubernetes.io/service-name") == meta.name
        for each in found.ports or ()
        if (each.name or None) == (port or None)
        for endpoint in found.endpoints or ()
        if endpoint.conditions.ready is not False
        for address in endpoint.addresses
    }


def _iptables(*words: str, check: bool = True) -> None:
    subprocess.run(["iptables", "-t", "nat", *words], check=check, capture_output=True)
