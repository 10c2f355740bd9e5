"""The operator with the chart's rights, a real API server and a real PlexRL cluster.

No kubelet runs here, so the tests report the phases of pods; Kubernetes' own controllers do the
rest where they run.
"""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import plexrl
from plexrl.cluster.embedded.start import EmbeddedCluster
from plexrl.cluster.kubernetes.lease import KubernetesLease
from plexrl.cluster.kubernetes.operator.manifest import FINALIZER, job_id
from tests.cluster.kubernetes.api_server import Kubernetes
from tests.cluster.kubernetes.chart import needs_helm, render
from tests.cluster.kubernetes.objects import RLJobs, dumps, install_crd, operator_process, wait_for

Plain = dict[str, Any]
ACCOUNT = "demo-plexrl-operator"
SECRET = "plx-a-very-secret-key"


@pytest.fixture
def rljobs(kubernetes: Kubernetes, namespace: str) -> RLJobs:
    install_crd(kubernetes.api())
    return RLJobs(kubernetes.api(), namespace)


def apply_rights(kubernetes: Kubernetes, namespace: str, folder: Path) -> Path:
    """Make the operator's account and roles as the chart has them; returns its kubeconfig."""
    from kubernetes.client import ApiException
    from kubernetes.utils import FailToCreateError, create_from_dict

    needs_helm()
    api = kubernetes.api()
    for each in render({}, folder, namespace=namespace):
        labels = each["metadata"].get("labels", {})
        if labels.get("app.kubernetes.io/component") != "operator" or each["kind"] == "Deployment":
            continue
        each["metadata"].pop("annotations", None)
        try:
            create_from_dict(api, each, namespace=namespace)
        except (FailToCreateError, ApiException) as error:
            raise AssertionError(f"{each['kind']} {each['metadata']['name']}: {error}") from error
    return kubernetes.account(namespace, ACCOUNT)


def options_of(namespace: str, url: str, *more: str) -> list[str]:
    return [
        f"--url={url}",
        f"--namespace={namespace}",
        f"--watch={namespace}",
        "--identity=operator-0",
        "--lease=demo-plexrl-operator",
        "--image=plexrl-control:tests",
        "--resync=0.5",
        "--health-port=0",
        "--drained-nodes=demo-plexrl-drained-nodes",
        "--lease-seconds=3",
        *more,
    ]


@pytest.fixture
def operator(
    kubernetes: Kubernetes,
    namespace: str,
    rljobs: RLJobs,
    embedded: EmbeddedCluster,
    tmp_path: Path,
) -> Iterator[None]:
    """The operator's process, with no more rights than the chart gives it."""
    del rljobs
    kubeconfig = apply_rights(kubernetes, namespace, tmp_path)
    environment = {"PLEXRL_API_KEY": embedded.api_key}
    with operator_process(kubeconfig, environment, *options_of(namespace, embedded.url)):
        yield


def needs_job_controller(kubernetes: Kubernetes) -> None:
    if kubernetes.audit_log is not None and "kube-controller-manager" not in kubernetes.controllers:
        pytest.skip("no kube-controller-manager: nothing makes pods of Jobs")


def is_ours(kubernetes: Kubernetes) -> None:
    if kubernetes.audit_log is None:
        pytest.skip("a real kubelet runs these pods")


@pytest.mark.usefixtures("operator")
def test_a_job_is_made_with_its_key_from_the_secret(rljobs: RLJobs) -> None:
    made = rljobs.create("train", image="team/train:1", args=["--fast"], retries=2)
    job = wait_for(lambda: rljobs.job("train"), "the Job")
    assert job["spec"]["backoffLimit"] == 2
    owner = job["metadata"]["ownerReferences"][0]
    assert (owner["kind"], owner["uid"]) == ("RLJob", made["metadata"]["uid"])
    container = job["spec"]["template"]["spec"]["containers"][0]
    assert container["image"] == "team/train:1"
    environment = {each["name"]: each for each in container["env"]}
    assert environment["PLEXRL_JOB_ID"]["value"] == job_id(made)
    reference = environment["PLEXRL_API_KEY"]["valueFrom"]["secretKeyRef"]
    assert reference == {"name": "tenant", "key": "key"}
    assert rljobs.wait_phase("train", "Pending")["job"] == job_id(made)
    found = rljobs.get("train")
    assert found is not None
    assert FINALIZER in found["metadata"]["finalizers"]


@pytest.mark.usefixtures("operator")
def test_the_status_says_what_the_scheduler_says(
    kubernetes: Kubernetes, rljobs: RLJobs, cluster: plexrl.Cluster
) -> None:
    needs_job_controller(kubernetes)
    is_ours(kubernetes)
    made = rljobs.create("waits")
    rljobs.report("waits", "Running")
    rljobs.wait_phase("waits", "Running")
    wait_for(
        lambda: rljobs.condition("waits", "Registered") == ("False", "NotCreated"), "the condition"
    )
    # The controller would do this with the id in its environment.
    with cluster.create_job("waits", job_id=job_id(made)):
        status = wait_for(
            lambda: rljobs.status("waits") if rljobs.status("waits").get("jobState") else None,
            "the job's state",
        )
        assert status["jobState"] == "QUEUED"
        assert rljobs.wait_phase("waits", "Waiting")["why"] == "it has no deployments yet"
        assert rljobs.condition("waits", "Registered") == ("True", "Known")
    rljobs.report("waits", "Succeeded")
    status = rljobs.wait_phase("waits", "Succeeded")
    assert rljobs.condition("waits", "Complete") == ("True", "Finished")
    assert status["completionTime"]
    wait_for(lambda: rljobs.status("waits").get("jobState") == "COMPLETED", "the last state")


@pytest.mark.usefixtures("operator")
def test_a_failed_controllers_job_is_cancelled_at_once(
    kubernetes: Kubernetes, rljobs: RLJobs, cluster: plexrl.Cluster
) -> None:
    needs_job_controller(kubernetes)
    is_ours(kubernetes)
    made = rljobs.create("fails", retries=0)
    job = cluster.create_job("fails", job_id=job_id(made), controller_timeout_s=600)
    rljobs.report("fails", "Running")
    rljobs.report("fails", "Failed", exit_code=1)
    status = rljobs.wait_phase("fails", "Failed")
    assert "BackoffLimitExceeded" in status["why"]
    wait_for(lambda: job.status()["state"] == "CANCELLED", "the end of the PlexRL job")
    job.detach()


@pytest.mark.usefixtures("operator")
def test_a_deleted_rljob_ends_its_plexrl_job_and_its_job(
    rljobs: RLJobs, cluster: plexrl.Cluster
) -> None:
    made = rljobs.create("gone")
    job = cluster.create_job("gone", job_id=job_id(made), controller_timeout_s=600)
    wait_for(lambda: rljobs.job("gone"), "the Job")
    rljobs.delete("gone")
    wait_for(lambda: rljobs.get("gone") is None, "the end of the RLJob")
    assert job.status()["state"] == "CANCELLED"
    assert job.status()["reason"] == "its RLJob was deleted"
    wait_for(lambda: rljobs.job("gone") is None, "the end of the Job")
    job.detach()


@pytest.mark.usefixtures("operator")
def test_suspend_ends_and_starts_the_controller(rljobs: RLJobs) -> None:
    rljobs.create("naps", suspend=True)
    job = wait_for(lambda: rljobs.job("naps"), "the Job")
    assert job["spec"]["suspend"] is True
    rljobs.wait_phase("naps", "Suspended")
    rljobs.patch("naps", {"suspend": False})
    wait_for(lambda: not (rljobs.job("naps") or job)["spec"]["suspend"], "the start")


@pytest.mark.usefixtures("operator")
def test_a_queue_of_kueue_decides_when_the_job_starts(rljobs: RLJobs) -> None:
    rljobs.create("queued", labels={"kueue.x-k8s.io/queue-name": "team"})
    job = wait_for(lambda: rljobs.job("queued"), "the Job")
    assert job["spec"]["suspend"] is True
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    rljobs.wait_phase("queued", "Suspended")
    rljobs.batch.patch_namespaced_job("queued", rljobs.namespace, {"spec": {"suspend": False}})
    rljobs.wait_phase("queued", "Pending")
    assert (rljobs.job("queued") or job)["spec"]["suspend"] is False


@pytest.mark.usefixtures("operator")
def test_a_changed_spec_and_a_taken_name_are_shown(rljobs: RLJobs) -> None:
    rljobs.create("changes")
    wait_for(lambda: rljobs.condition("changes", "UpToDate") == ("True", "Same"), "the Job")
    rljobs.patch("changes", {"command": ["python", "-c", "print()"]})
    wait_for(
        lambda: rljobs.condition("changes", "UpToDate") == ("False", "SpecChanged"), "the change"
    )
    body: dict[str, Any] = {
        "metadata": {"name": "taken"},
        "spec": {
            "suspend": True,
            "template": {
                "metadata": {"labels": {"plexrl.dev/rljob": "other"}},
                "spec": {
                    "restartPolicy": "Never",
                    "containers": [{"name": "other", "image": "other"}],
                },
            },
        },
    }
    body["metadata"]["labels"] = {"plexrl.dev/rljob": "other"}
    rljobs.batch.create_namespaced_job(rljobs.namespace, body)
    rljobs.create("taken")
    wait_for(
        lambda: rljobs.condition("taken", "JobCreated") == ("False", "NameTaken"), "the conflict"
    )
    rljobs.delete("taken")
    wait_for(lambda: rljobs.get("taken") is None, "the end of the RLJob")
    assert rljobs.job("taken") is not None


def test_the_api_server_refuses_a_wrong_spec(rljobs: RLJobs) -> None:
    from kubernetes.client import ApiException

    wrong: list[Plain] = [
        {"command": ["a"], "script": {"configMap": "a", "key": "b"}},
        {"command": []},
        {"retries": -1},
        {"env": [{"name": "PLEXRL_API_KEY", "value": SECRET}]},
        {"apiKeySecret": {"key": "key"}},
    ]
    for spec in wrong:
        with pytest.raises(ApiException) as caught:
            rljobs.create("wrong", **spec)
        assert caught.value.status == 422, spec


@pytest.mark.usefixtures("operator")
def test_no_secret_gets_into_a_status_or_a_job(rljobs: RLJobs) -> None:
    rljobs.core.create_namespaced_secret(
        rljobs.namespace, {"metadata": {"name": "tenant"}, "stringData": {"key": SECRET}}
    )
    rljobs.create("quiet")
    wait_for(lambda: rljobs.status("quiet"), "the status")
    assert SECRET not in dumps(rljobs.get("quiet"))
    assert SECRET not in dumps(rljobs.job("quiet"))


def test_a_killed_operator_leaves_nothing_undone(
    kubernetes: Kubernetes,
    namespace: str,
    rljobs: RLJobs,
    embedded: EmbeddedCluster,
    tmp_path: Path,
) -> None:
    kubeconfig = apply_rights(kubernetes, namespace, tmp_path)
    environment = {"PLEXRL_API_KEY": embedded.api_key}
    options = options_of(namespace, embedded.url)
    with operator_process(kubeconfig, environment, *options) as process:
        rljobs.create("before")
        wait_for(lambda: rljobs.job("before"), "the Job")
        process.kill()
        process.wait()
    rljobs.create("between")
    rljobs.delete("before")
    # Another identity, which has to wait for the lease.
    with operator_process(kubeconfig, environment, *options, "--identity=operator-1"):
        wait_for(lambda: rljobs.job("between"), "the Job of the second operator")
        wait_for(lambda: rljobs.get("before") is None, "the end of the first RLJob")


def test_a_cordoned_node_is_drained_and_taken_back(
    kubernetes: Kubernetes, cluster: plexrl.Cluster, namespace: str, tmp_path: Path
) -> None:
    from plexrl.cluster.kubernetes.operator.cordon import CordonFollower
    from plexrl.cluster.kubernetes.operator.jobs import ClusterJobs

    is_ours(kubernetes)
    api = kubernetes.api(apply_rights(kubernetes, namespace, tmp_path))
    core = RLJobs(kubernetes.api(), namespace).core
    core.create_node({"metadata": {"name": "node0"}})
    stop = threading.Event()
    follower = CordonFollower(
        api, ClusterJobs(cluster), namespace, "demo-plexrl-drained-nodes", resync_s=0.5
    )
    thread = threading.Thread(target=follower.run, args=(stop,), daemon=True)
    thread.start()

    def is_draining() -> bool:
        return bool(
            next(each for each in cluster.nodes() if each["node"] == "node0")["is_draining"]
        )

    try:
        core.patch_node("node0", {"spec": {"unschedulable": True}})
        wait_for(is_draining, "the drain")
        core.patch_node("node0", {"spec": {"unschedulable": None}})
        wait_for(lambda: not is_draining(), "the return")
        # What a person drained is that person's.
        cluster.drain("node0")
        core.patch_node("node0", {"metadata": {"labels": {"changed": "yes"}}})
        wait_for(lambda: not follower._changed.is_set(), "a look at the nodes")
        follower.follow()
        assert is_draining()
    finally:
        cluster.undrain("node0")
        stop.set()
        thread.join(10)
        core.delete_node("node0")


def test_the_first_job_of_a_controller_has_the_rljobs_id(
    embedded: EmbeddedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLEXRL_JOB_ID", "train-6a1c7e02")
    with (
        plexrl.connect(embedded.url, embedded.api_key) as cluster,
        cluster.create_job("train") as first,
        cluster.create_job("train") as second,
    ):
        assert first.job == "train-6a1c7e02"
        assert second.job != first.job
    with (
        plexrl.connect(embedded.url, embedded.api_key) as cluster,
        cluster.create_job("train", job_id="other") as chosen,
    ):
        assert chosen.job == "other"


def test_one_of_two_holds_the_lease(kubernetes: Kubernetes, namespace: str) -> None:
    now = [100.0]
    first, second = (
        KubernetesLease(kubernetes.api(), namespace, "lease", name, 10.0, clock=lambda: now[0])
        for name in ("first", "second")
    )
    assert first.try_hold()
    assert not second.try_hold()
    now[0] += 7.0
    assert not first.is_held, "the holder gives up before another may take it"
    assert first.try_hold()
    assert not second.try_hold()
    now[0] += 10.5
    assert second.try_hold()
    assert not first.try_hold()
    second.release()
    assert first.try_hold()


def test_the_chart_gives_the_operator_what_it_uses_and_nothing_else(
    kubernetes: Kubernetes,
    namespace: str,
    rljobs: RLJobs,
    embedded: EmbeddedCluster,
    cluster: plexrl.Cluster,
    tmp_path: Path,
) -> None:
    if kubernetes.audit_log is None:
        pytest.skip("the audit log of this cluster is not ours")
    kubeconfig = apply_rights(kubernetes, namespace, tmp_path)
    core = rljobs.core
    core.create_node({"metadata": {"name": "node0"}})
    try:
        environment = {"PLEXRL_API_KEY": embedded.api_key}
        with operator_process(kubeconfig, environment, *options_of(namespace, embedded.url)):
            rljobs.create("uses", suspend=True)
            rljobs.wait_phase("uses", "Suspended")
            rljobs.patch("uses", {"suspend": False})
            rljobs.wait_phase("uses", "Pending")
            rljobs.delete("uses")
            wait_for(lambda: rljobs.get("uses") is None, "the end of the RLJob")
            core.patch_node("node0", {"spec": {"unschedulable": True}})
            wait_for(
                lambda: any(each["is_draining"] for each in cluster.nodes()), "the drained node"
            )
            renewal = ("update", "coordination.k8s.io", "leases")
            wait_for(lambda: renewal in kubernetes.calls_of(namespace, ACCOUNT), "a renewal")
            core.patch_node("node0", {"spec": {"unschedulable": None}})
            wait_for(lambda: not any(each["is_draining"] for each in cluster.nodes()), "its return")
    finally:
        core.delete_node("node0")
    granted = {
        (verb, group, resource)
        for each in render({}, tmp_path, namespace=namespace)
        if each["kind"] in ("Role", "ClusterRole")
        and each["metadata"]["labels"]["app.kubernetes.io/component"] == "operator"
        for rule in each["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert kubernetes.calls_of(namespace, ACCOUNT) == granted
