"""A machine of a Kubernetes cluster, as the first program of a simulated host.

`python -m tests.cluster.kubernetes.machine ADDRESS GROUP` starts etcd, the API server, its
controllers and scheduler, containerd and a kubelet, and says so once the node is ready. Containers
are real: namespaces, control groups (below GROUP), seccomp, users, probes, projected tokens and
restarts are the kubelet's and runc's own. Images are empty (`images.py`), `services.py` stands in
for kube-proxy and DNS, and volumes are folders of the host.
"""

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from tests.cluster.kubernetes.api_server import find_tool, missing_tools, running_kubernetes, spawn
from tests.cluster.kubernetes.chart import CHART
from tests.cluster.kubernetes.images import PAUSE, mounts, write_images
from tests.cluster.kubernetes.objects import wait_for
from tests.cluster.kubernetes.services import DOMAIN, Services

if TYPE_CHECKING:
    from kubernetes.client import ApiClient

Plain = dict[str, Any]
PROGRAMS = ("kubelet", "kube-controller-manager", "kube-scheduler", "containerd", "runc", "ctr")
OTHERS = ("dnsmasq", "iptables", "kubectl", "helm", "tini")
PLUGINS = Path("/usr/lib/cni")
FOLDER = Path("/var/lib/kubernetes")
KUBECONFIG = FOLDER / "kubeconfig"
SOCKET = FOLDER / "containerd.sock"
PODS = "10.244.0.0/24"
SETTINGS = (
    *("vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops"),
    *("kernel/keys/root_maxkeys", "kernel/keys/root_maxbytes"),
)
"""Of the kernel, which the kubelet sets."""
CGROUPS = Path("/sys/fs/cgroup")
READY = "the node is ready"
START_S = 120.0


def why_impossible() -> str:
    """What a machine of a cluster lacks here; empty: nothing."""
    missing = missing_tools() + [each for each in (*PROGRAMS, *OTHERS) if find_tool(each) is None]
    if not PLUGINS.is_dir():
        missing.append(f"plugins of CNI in {PLUGINS}")
    return f"no {', no '.join(missing)}" if missing else ""


def main(address: str, group: str) -> None:
    """Run the machine until SIGTERM."""
    FOLDER.mkdir(parents=True)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    _mount_cgroups()
    _prepare_kernel()
    with ExitStack() as stack:
        server = stack.enter_context(running_kubernetes(FOLDER, address))
        spawn(stack, FOLDER, "containerd", f"--config={_containerd_config()}")
        _import_images()
        _make_groups(group)
        options = (f"--kubeconfig={KUBECONFIG}", f"--node-ip={address}")
        spawn(
            stack,
            FOLDER,
            "kubelet",
            *options,
            f"--config={_kubelet_config(address, group)}",
            f"--root-dir={FOLDER / 'kubelet'}",
            f"--cert-dir={FOLDER / 'kubelet-certificates'}",
        )
        services = Services(server.api(), FOLDER, address)
        following = threading.Thread(target=services.follow, args=(stop,))
        following.start()
        _await_node(server.api())
        sys.stdout.write(f"{READY}\n")
        sys.stdout.flush()
        stop.wait()
        following.join()


def _mount_cgroups() -> None:
    """The control groups of this machine, of version 1 or 2."""
    lines = [line.split(":") for line in Path("/proc/self/cgroup").read_text().splitlines()]
    first = [names for number, names, _ in lines if number != "0"]
    if not first:
        _mount("-t", "cgroup2", "cgroup2", str(CGROUPS))
        return
    _mount("-t", "tmpfs", "tmpfs", str(CGROUPS))
    for names in first:
        folder = CGROUPS / names.removeprefix("name=")
        folder.mkdir()
        options = f"none,{names}" if names.startswith("name=") else names
        _mount("-t", "cgroup", "-o", options, "cgroup", str(folder))


def _prepare_kernel() -> None:
    """What the kubelet finds on a machine; settings that the whole machine shares are copies, so
    that it changes nothing outside."""
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    os.mknod("/dev/kmsg", stat.S_IFCHR | 0o600, os.makedev(1, 11))
    copies = FOLDER / "settings"
    copies.mkdir()
    for name in SETTINGS:
        copy = copies / name.replace("/", ".")
        copy.write_text(Path("/proc/sys", name).read_text())
        _mount("--bind", str(copy), f"/proc/sys/{name}")


def _containerd_config() -> Path:
    base = json.loads(_output("ctr", "oci", "spec"))
    base["mounts"] = [each for each in base["mounts"] if each["destination"] != "/run"] + mounts()
    specification = FOLDER / "base.json"
    specification.write_text(json.dumps(base))
    plugins = FOLDER / "cni"
    plugins.mkdir()
    ways = {"type": "host-local", "subnet": PODS, "routes": [{"dst": "0.0.0.0/0"}]}
    network = {
        "cniVersion": "0.4.0",
        "name": "pods",
        "plugins": [{"type": "ptp", "ipMasq": False, "ipam": ways}],
    }
    (plugins / "10-pods.conflist").write_text(json.dumps(network))
    path = FOLDER / "containerd.toml"
    plugin = 'plugins."io.containerd.grpc.v1.cri"'
    path.write_text(
        f"""
version = 2
root = "{FOLDER}/containerd"
state = "/run/containerd"
[grpc]
address = "{SOCKET}"
[{plugin}]
sandbox_image = "{PAUSE}"
restrict_oom_score_adj = true
[{plugin}.containerd]
snapshotter = "native"
[{plugin}.containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
base_runtime_spec = "{specification}"
[{plugin}.cni]
bin_dir = "{PLUGINS}"
conf_dir = "{plugins}"
"""
    )
    return path


def _import_images() -> None:
    archive = FOLDER / "images.tar"
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    write_images(archive, chart["appVersion"])
    command = ["ctr", f"--address={SOCKET}", "--namespace=k8s.io", "images", "import"]

    def is_done() -> bool:
        return not subprocess.run([*command, str(archive)], check=False).returncode

    wait_for(is_done, "containerd", START_S)


def _kubelet_config(address: str, group: str) -> Path:
    path = FOLDER / "kubelet.yaml"
    config: Plain = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "containerRuntimeEndpoint": f"unix://{SOCKET}",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": group,
        "enforceNodeAllocatable": [],
        "failCgroupV1": False,
        "failSwapOn": False,
        "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
        "authorization": {"mode": "AlwaysAllow"},
        "address": address,
        "clusterDNS": [address],
        "clusterDomain": DOMAIN,
        "resolvConf": "/etc/resolv.conf",
        "podLogsDir": str(FOLDER / "logs"),
        # A test needs little of a full disk.
        "evictionHard": {"memory.available": "1Mi", "nodefs.available": "0%"},
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
    }
    path.write_text(yaml.safe_dump(config))
    return path


def _await_node(api: "ApiClient") -> None:
    from kubernetes.client import CoreV1Api

    core = CoreV1Api(api)

    def is_ready() -> bool:
        return any(
            each.type == "Ready" and each.status == "True"
            for node in core.list_node().items
            for each in node.status.conditions or ()
        )

    try:
        wait_for(is_ready, "the node", START_S)
    except AssertionError:
        sys.stderr.write((FOLDER / "kubelet.log").read_text()[-4000:])
        raise


def _make_groups(group: str) -> None:
    for folder in [CGROUPS] if (CGROUPS / "cgroup.procs").exists() else CGROUPS.iterdir():
        made = folder / group.lstrip("/")
        made.mkdir()
        for name in ("cpuset.cpus", "cpuset.mems"):
            if (folder / name).exists():
                (made / name).write_text((folder / name).read_text())


def remove_groups(group: str) -> None:
    """Remove a machine's control groups, from outside, once it is off."""

    def is_done() -> bool:
        found = [Path(root) for root, _, _ in os.walk(CGROUPS, topdown=False) if group in root]
        for folder in found:
            # The kernel needs a moment to end the processes in it.
            with suppress(OSError):
                folder.rmdir()
        return not found

    wait_for(is_done, "the end of the containers")


def _mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True)


def _output(*words: str) -> str:
    program = shutil.which(words[0])
    assert program is not None
    return subprocess.run([program, *words[1:]], check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
