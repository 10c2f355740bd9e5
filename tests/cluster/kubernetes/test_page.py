"""The commands and manifests of docs/kubernetes.md, in their order, on a cluster of one machine.

The machine is a simulated host with etcd, kube-apiserver, its controllers and scheduler, kubelet,
containerd and runc (`machine.py`). Not covered: the section on images, since there is no registry
(containers see this machine's programs); GPUs and their device plugin; `kube-proxy`, DNS and a
StorageClass, for which the tests have stand-ins; Ingress, NetworkPolicy, Kueue and KubeRay.
"""

import re
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.cluster.kubernetes.machine import (
    FOLDER,
    KUBECONFIG,
    READY,
    remove_groups,
    why_impossible,
)
from tests.docs.pages import Block, blocks
from tests.hosts.host import REPOSITORY, Host
from tests.hosts.network import hosts
from tests.hosts.network import why_impossible as why_no_hosts

PAGE = "docs/kubernetes.md"
COMMANDS = ("kubectl", "helm")
START_S = 240.0
STEP_S = 900.0
WORK = "/srv/page"
VERBS = [
    *("kubectl create", "helm install", "kubectl -n", "kubectl -n", "kubectl apply"),
    "helm upgrade",
]
"""First words of the page's scripts."""
PODS = """
import sys, yaml
objects = yaml.safe_load_all(sys.stdin)
print(yaml.safe_dump_all(each for each in objects if each["kind"] == "Pod"))
"""
VOLUME = """
apiVersion: v1
kind: PersistentVolume
metadata: {{name: {name}}}
spec:
  capacity: {{storage: 100Gi}}
  accessModes: [ReadWriteOnce]
  local: {{path: /srv/{name}}}
  nodeAffinity:
    required:
      nodeSelectorTerms:
        - matchExpressions: [{{key: kubernetes.io/hostname, operator: In, values: [{host}]}}]
"""


class Reader:
    """Somebody who follows the page in one shell."""

    def __init__(self, host: Host) -> None:
        self._host, self._count = host, 0
        self._shell = host.start("bash", "-e", env={"KUBECONFIG": str(KUBECONFIG)})

    def run(self, script: str) -> str:
        """Run commands; returns what they print."""
        self._count += 1
        before, mark = len(self._shell.text()), f"end of step {self._count}"
        path = Path(WORK, f"{self._count}.sh")
        self._host.path(path).write_text(script)
        self._shell.send(f"cd {WORK}; source {path} < /dev/null; echo {mark}\n")
        try:
            self._shell.wait_for(mark, STEP_S)
        except AssertionError as error:
            raise AssertionError(f"{script}\n{error}\n{self._state()}") from error
        return self._shell.text()[before:]

    def write(self, block: Block) -> None:
        """Write a manifest to the file that its first line names."""
        name = block.text.split(maxsplit=2)[1].rstrip(",")
        self._host.path(f"{WORK}/{name}").write_text(block.text)

    def pods(self) -> set[str]:
        """Pods of PlexRL's namespace, without that of `helm test`."""
        show = "kubectl -n plexrl get pods -o name -l app.kubernetes.io/component!=test"
        return set(self.run(show).split("end of step")[0].split())

    def wait_for_steps(self, count: int) -> None:
        """Wait until the RLJob's controller has made so many steps."""
        show = f"kubectl -n team-a logs job/train | grep -qE 'step +{count}/'"
        self.run(f"until {show}; do sleep 1; done")

    def _state(self) -> str:
        look = (
            "kubectl get pods -A; kubectl get rljobs -A; kubectl get events -A | tail -30; "
            "for each in $(kubectl -n plexrl get pods -o name); do "
            "kubectl -n plexrl logs $each --all-containers --tail=20; done; "
            f"tail -c 2000 {FOLDER}/kubelet.log"
        )
        env = {"KUBECONFIG": str(KUBECONFIG)}
        return self._host.run("bash", "-c", look, env=env, check=False).stdout


@pytest.fixture
def machine() -> Iterator[Host]:
    """A machine with a cluster, in which a volume waits for each claim."""
    reason = why_no_hosts() or why_impossible()
    if reason:
        pytest.skip(reason)
    group = f"/plexrl-tests-{uuid.uuid4().hex[:8]}"
    with ExitStack() as stack:
        stack.callback(remove_groups, group)
        (host,) = stack.enter_context(hosts("machine"))
        program = ("python", "-m", "tests.cluster.kubernetes.machine", host.address, group)
        process = host.start(*program)
        process.wait_for(READY, START_S)
        for name in ("journal", "data", "rollout"):
            host.path(f"/srv/{name}").mkdir()
            text = VOLUME.format(name=name, host=host.name)
            env = {"KUBECONFIG": str(KUBECONFIG)}
            host.run("kubectl", "create", "-f", "-", env=env, stdin=text)
        host.path(WORK).mkdir()
        for name in ("deploy", "examples"):
            host.path(f"{WORK}/{name}").symlink_to(REPOSITORY / name)
        yield host


def steps_of(page: str) -> list[Block]:
    """Commands, and manifests that begin with a comment, which names their file."""
    return [
        block
        for block in blocks()
        if block.page == page
        and (
            block.text.startswith("# ")
            if block.language == "yaml"
            else not block.language and block.text.split()[0] in COMMANDS
        )
    ]


def with_test(host: Host, script: str) -> str:
    """The script; if this machine's helm lacks `helm test`, kubectl runs the same pod."""
    command = "helm test plexrl --namespace plexrl"
    if command not in script:
        return script
    known = host.run("helm", "test", "no-release", check=False)
    if "unknown command" not in known.stdout + known.stderr:
        return script
    render = "helm template plexrl deploy/helm/plexrl --namespace plexrl -f values.yaml"
    succeeded = "--for=jsonpath='{.status.phase}'=Succeeded --timeout=5m"
    return script.replace(
        command,
        f"{render} | python -c '{PODS}' | kubectl -n plexrl create -f -\n"
        f"kubectl -n plexrl wait pod/plexrl-test-connect {succeeded}",
    )


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_page_leads_from_an_empty_cluster_to_a_trained_model(machine: Host) -> None:
    reader = Reader(machine)
    replaced: set[str] = set()
    done: list[str] = []
    for block in steps_of(PAGE):
        verb = " ".join(block.text.split()[:2])
        if block.language == "yaml":
            reader.write(block)
            continue
        if verb == "helm upgrade":
            reader.wait_for_steps(5)
            replaced = reader.pods()
            # With another annotation every pod is replaced.
            reader.run("echo 'podAnnotations: {upgrade: one}' >> values.yaml")
        printed = reader.run(with_test(machine, block.text))
        done.append(verb)
        if "plexrl nodes" in block.text:
            assert re.search(r"^machine +yes", printed, re.MULTILINE), printed
    assert done == VERBS
    succeeded = "--for=jsonpath='{.status.phase}'=Succeeded"
    reader.run(f"kubectl -n team-a wait rljob/train {succeeded} --timeout={STEP_S:g}s")
    assert replaced
    assert not replaced & reader.pods(), "the upgrade left a pod as it was"
    assert "150/150" in reader.run("kubectl -n team-a logs job/train | tail -3")
