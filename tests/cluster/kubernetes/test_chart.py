"""The Helm chart: valid for each version of Kubernetes, secure by default, with checked values."""

import json
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from plexrl.cluster.kubernetes.settings import fill
from plexrl.process.children.startup import parse_config
from plexrl.rollout.service.config import RolloutConfig
from plexrl.router.server.config import RouterConfig
from plexrl.scheduler.rules.config import SchedulerConfig
from plexrl.statemanager.config import StateManagerConfig
from plexrl.worker.interface.config import AgentConfig
from tests.cluster.kubernetes.chart import (
    CHART,
    FULL,
    KUBERNETES,
    SHARED_VOLUME,
    VALUES,
    helm,
    needs_helm,
    of_kind,
    pod_specs,
    refused,
    render,
)

Plain = dict[str, Any]
VERSIONS = ("1.34", "1.35", "1.36", "1.37")
FOREIGN = {"ServiceMonitor"}
"""Kinds of other operators, whose schemas Kubernetes does not have."""
ENVIRONMENT = {
    "POD": "pod-0",
    "POD_IP": "10.0.0.7",
    "POD_HOST": "10.0.0.7",
    "POD_UID": "1-2-3",
    "NAMESPACE": "plexrl",
    "NODE": "node-1",
    "OPERATOR_KEY": "plx-secret",
    "JOURNAL": "postgresql://user:password@host/name",
}
LABELS = {"topology.kubernetes.io/rack": "rack3", "example.com/row": "row1"}


@pytest.fixture(autouse=True)
def _helm() -> None:
    needs_helm()


@pytest.mark.parametrize(
    "version",
    [
        VERSIONS[0],
        *(pytest.param(each, marks=pytest.mark.slow) for each in VERSIONS[1:-1]),
        VERSIONS[-1],
    ],
)
@pytest.mark.parametrize("name", VALUES)
def test_every_object_is_valid_for_each_version(name: str, version: str, tmp_path: Path) -> None:
    checked = [each for each in render(VALUES[name], tmp_path) if each["kind"] not in FOREIGN]
    assert {"ConfigMap", "Deployment", "Service"} <= {each["kind"] for each in checked}
    for each in checked:
        kubernetes_validate.validate(each, version, strict=True)


def test_the_validation_finds_a_misspelt_field(tmp_path: Path) -> None:
    deployment = of_kind(render({}, tmp_path), "Deployment")["demo-plexrl-router"]
    deployment["spec"]["replica"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(deployment, VERSIONS[-1], strict=True)


def test_helm_finds_no_fault_in_the_chart() -> None:
    shown = helm("lint", "--strict", "--kube-version", KUBERNETES, str(CHART))
    assert shown.returncode == 0, shown.stdout + shown.stderr


@pytest.mark.parametrize(
    ("values", "place"),
    [
        ({"schedulr": {}}, "schedulr"),
        ({"scheduler": {"replicas": 0}}, "/scheduler/replicas"),
        ({"scheduler": {"replicas": 2}}, "/journal/type"),
        ({"journal": {"type": "postgresql"}}, "/journal/postgresql/secretName"),
        ({"router": {"replicas": 2}}, "/data"),
        ({"router": {"modelRoots": ["models"]}}, "/router/modelRoots/0"),
        ({"router": {"ingress": {"enabled": True}}}, "/router/ingress/hosts"),
        ({"nodePools": [{"gpus": 1}]}, "name"),
        ({"nodePools": [{"name": "a", "gpu": 1}]}, "gpu"),
        ({"nodePools": [{"name": "A_b"}]}, "/nodePools/0/name"),
        ({"nodePools": [{"name": "a", "hostMemory": "2 GiB"}]}, "/nodePools/0/hostMemory"),
        ({"nodePools": [{"name": "a", "fabric": "open"}]}, "/nodePools/0/fabric"),
        ({"nodePools": [{"name": "a", "ports": [7000]}]}, "/nodePools/0/ports"),
        ({"nodePools": [{"name": "a", "workers": "pods"}]}, "hostMemoryPath"),
        ({"images": {"control": {"digest": "latest"}}}, "/images/control/digest"),
        ({"data": {"url": "bucket"}}, "/data/url"),
        ({"rollout": {"replicas": 2}}, "rollout"),
        ({"rollout": {"volume": {"size": "much"}}}, "/rollout/volume/size"),
        ({"user": 0}, "/user"),
        ({"events": {"url": "http://broker"}}, "/events/url"),
        ({"events": {"settings": {"password": "open"}}}, "/events/settings"),
        ({"events": {"url": "mqtt://broker", "passwordKey": "p"}}, "events.secretName"),
        ({"nodePools": [{"name": "a", "gpuResource": "a.b/c", "gpuDeviceClass": "d"}]}, "pool a"),
        (
            {
                "nodePools": [
                    {
                        "name": "a",
                        "workers": "pods",
                        "gpuDeviceClass": "d",
                        "hostMemoryPath": "/m",
                        "hostNetwork": True,
                        "nvme": {"hostPath": "/n"},
                    }
                ]
            },
            "workers: daemon",
        ),
    ],
)
def test_wrong_values_are_refused_by_name(values: Plain, place: str, tmp_path: Path) -> None:
    assert place.strip("/").replace("/", ".") in refused(values, tmp_path)


def test_every_value_is_in_the_schema_and_every_default_is_valid() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert set(schema["properties"]) - {"global"} == set(values)
    pool = schema["properties"]["nodePools"]["items"]["properties"]
    assert set(pool) == {*values["nodeDefaults"], "name"}


@pytest.mark.parametrize("name", VALUES)
def test_settings_are_those_that_the_processes_read(name: str, tmp_path: Path) -> None:
    maps = of_kind(render(VALUES[name], tmp_path), "ConfigMap")

    def settings(config_map: str, file: str) -> Plain:
        found: Plain = fill(json.loads(maps[config_map]["data"][file]), ENVIRONMENT, LABELS)
        return found

    scheduler = settings("demo-plexrl-scheduler", "scheduler.json")
    router = settings("demo-plexrl-router", "router.json")
    parse_config(json.dumps(scheduler), SchedulerConfig, name)
    given = parse_config(json.dumps(router), RouterConfig, name)
    assert given.model_roots == tuple(VALUES[name].get("router", {}).get("modelRoots", ()))
    if "demo-plexrl-rollout" in maps:
        rollout = settings("demo-plexrl-rollout", "rollout.json")
        parse_config(json.dumps(rollout), RolloutConfig, name)
        assert router["rollout"].endswith(rollout["listen"][0].rpartition(":")[2])
    else:
        assert "rollout" not in router
    for pool in VALUES[name].get("nodePools", ()):
        node = settings(f"demo-plexrl-node-{pool['name']}", "node.json")
        parse_config(json.dumps(node["statemanager"]), StateManagerConfig, name)
        agent = parse_config(json.dumps(node["agent"]), AgentConfig, name)
        assert agent.node == "node-1"
        assert agent.block == ("row1/rack3" if "blockLabel" in pool else "rack3")
        assert agent.host == "10.0.0.7"


@pytest.mark.parametrize("name", VALUES)
def test_pods_meet_the_restricted_standard_unless_they_need_folders_of_the_node(
    name: str, tmp_path: Path
) -> None:
    specs = pod_specs(render(VALUES[name], tmp_path))
    assert {"Deployment/demo-plexrl-scheduler", "Deployment/demo-plexrl-router"} <= specs.keys()
    for where, spec in specs.items():
        if where == "DaemonSet/demo-plexrl-node-cpu":
            # Workers as pods need hostPath: the privileged standard.
            continue
        allowed = {"IPC_LOCK"} if where == "DaemonSet/demo-plexrl-node-h200" else set()
        assert not spec.get("hostNetwork"), where
        assert spec["securityContext"]["runAsNonRoot"] is True, where
        assert spec["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault", where
        assert not any("hostPath" in volume for volume in spec.get("volumes", ())), where
        for container in [*spec["containers"], *spec.get("initContainers", ())]:
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False, where
            assert security["readOnlyRootFilesystem"] is True, where
            assert security["capabilities"]["drop"] == ["ALL"], where
            assert set(security["capabilities"].get("add", ())) <= allowed, where


@pytest.mark.parametrize("name", VALUES)
def test_a_token_of_the_api_server_is_mounted_only_where_it_is_used(
    name: str, tmp_path: Path
) -> None:
    objects = render(VALUES[name], tmp_path)
    roles = {
        subject["name"]
        for kind in ("RoleBinding", "ClusterRoleBinding")
        for binding in of_kind(objects, kind).values()
        for subject in binding["subjects"]
    }
    for where, spec in pod_specs(objects).items():
        has_token = spec.get("automountServiceAccountToken") is not False or any(
            volume["name"] == "api-token" for volume in spec.get("volumes", ())
        )
        account = spec.get("serviceAccountName", "default")
        assert has_token == (account in roles), where


def test_no_role_reads_secrets_but_those_of_the_hook(tmp_path: Path) -> None:
    objects = render(FULL, tmp_path)
    with_secrets = set()
    for kind in ("Role", "ClusterRole"):
        for name, role in of_kind(objects, kind).items():
            for rule in role["rules"]:
                assert "*" not in rule["verbs"] + rule["resources"] + rule["apiGroups"]
                if "secrets" in rule["resources"]:
                    with_secrets.add(name)
                    assert rule["verbs"] == ["create"] or rule["resourceNames"]
    assert with_secrets == {"demo-plexrl-keys"}


def test_secrets_are_in_no_configuration_of_the_release(tmp_path: Path) -> None:
    objects = render(FULL, tmp_path)
    assert not of_kind(objects, "Secret")
    text = json.dumps(
        [each["data"] for each in of_kind(objects, "ConfigMap").values() if "data" in each]
    )
    assert "${JOURNAL}" in text
    assert "${sha256:OPERATOR_KEY}" in text
    assert "password" not in text.replace("password_file", "").replace(
        "/run/plexrl-events/password", ""
    )


def test_one_scheduler_is_replaced_and_several_are_rolled(tmp_path: Path) -> None:
    one = of_kind(render({}, tmp_path), "Deployment")["demo-plexrl-scheduler"]["spec"]
    assert one["strategy"] == {"type": "Recreate"}
    objects = render(FULL, tmp_path)
    several = of_kind(objects, "Deployment")["demo-plexrl-scheduler"]["spec"]
    assert several["strategy"]["type"] == "RollingUpdate"
    selector = of_kind(objects, "Service")["demo-plexrl-scheduler"]["spec"]["selector"]
    assert selector["plexrl.dev/leader"] == "true"
    assert {"demo-plexrl-scheduler", "demo-plexrl-router"} <= set(
        of_kind(objects, "PodDisruptionBudget")
    )


def test_rollouts_outlive_their_pod_and_one_process_writes_them(tmp_path: Path) -> None:
    objects = render({}, tmp_path)
    deployment = of_kind(objects, "Deployment")["demo-plexrl-rollout"]["spec"]
    assert (deployment["replicas"], deployment["strategy"]) == (1, {"type": "Recreate"})
    settings = json.loads(
        of_kind(objects, "ConfigMap")["demo-plexrl-rollout"]["data"]["rollout.json"]
    )
    spec = deployment["template"]["spec"]
    (mount,) = (
        each
        for each in spec["containers"][0]["volumeMounts"]
        if each["mountPath"] == settings["data_dir"]
    )
    (volume,) = (each for each in spec["volumes"] if each["name"] == mount["name"])
    claim = of_kind(objects, "PersistentVolumeClaim")[volume["persistentVolumeClaim"]["claimName"]]
    assert claim["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    issuer = pod_specs(objects)["Deployment/demo-plexrl-issuer"]["containers"][0]["args"]
    assert "--role=rollout=plexrl/demo-plexrl-rollout" in issuer
    assert not any(
        "rollout" in json.dumps(each["metadata"])
        for each in render({"rollout": {"enabled": False}}, tmp_path)
    )


def test_the_node_takes_all_its_gpus_in_one_container(tmp_path: Path) -> None:
    spec = pod_specs(render(FULL, tmp_path))["DaemonSet/demo-plexrl-node-h200"]
    with_gpus = [
        container["name"]
        for container in [*spec["containers"], *spec["initContainers"]]
        if "nvidia.com/gpu" in container.get("resources", {}).get("limits", {})
    ]
    assert with_gpus == ["node"]
    assert spec["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 8
    memory = next(volume for volume in spec["volumes"] if volume["name"] == "memory")
    assert memory["emptyDir"] == {"medium": "Memory", "sizeLimit": "512Gi"}


def test_gpus_of_a_device_class_are_claimed_by_the_node_alone(tmp_path: Path) -> None:
    objects = render(FULL, tmp_path)
    (name,) = of_kind(objects, "ResourceClaimTemplate")
    (request,) = of_kind(objects, "ResourceClaimTemplate")[name]["spec"]["spec"]["devices"][
        "requests"
    ]
    assert request["exactly"]["deviceClassName"] == "gpu.nvidia.com"
    assert request["exactly"]["count"] == 4
    pool = name.rpartition("-")[0]
    spec = pod_specs(objects)[f"DaemonSet/{pool}"]
    (claim,) = spec["resourceClaims"]
    assert claim["resourceClaimTemplateName"] == name
    containers = [*spec["containers"], *spec["initContainers"]]
    claiming = {
        each["name"]: each["resources"]["claims"]
        for each in containers
        if "claims" in each.get("resources", {})
    }
    assert claiming == {"node": [{"name": claim["name"]}]}
    node = json.loads(of_kind(objects, "ConfigMap")[pool]["data"]["node.json"])
    assert (node["statemanager"]["device"], node["agent"]["gpus"]) == ("cuda", 4)


def test_the_scheduler_finds_the_secrets_of_its_broker(tmp_path: Path) -> None:
    objects = render(FULL, tmp_path)
    maps = of_kind(objects, "ConfigMap")
    events = json.loads(maps["demo-plexrl-scheduler"]["data"]["scheduler.json"])["events"]
    spec = pod_specs(objects)["Deployment/demo-plexrl-scheduler"]
    (volume,) = (each for each in spec["volumes"] if each.get("secret"))
    assert volume["secret"]["secretName"] == "broker"
    (mount,) = (
        each for each in spec["containers"][0]["volumeMounts"] if each["name"] == volume["name"]
    )
    files = {f"{mount['mountPath']}/{each['path']}" for each in volume["secret"]["items"]}
    assert {events["password_file"], events["ca"]} == files
    assert (events["interval_s"], events.get("key")) == (1, None)


def test_folders_of_the_node_get_the_pods_user_and_only_they_do(tmp_path: Path) -> None:
    specs = pod_specs(render(FULL, tmp_path))
    first, *others = specs["DaemonSet/demo-plexrl-node-cpu"]["initContainers"]
    folders = ["/dev/shm", "/var/lib/plexrl/nvme", "/var/lib/plexrl/data", "/run/plexrl"]
    assert first["command"] == ["chown", "10001:10001", *folders]
    assert [each["mountPath"] for each in first["volumeMounts"]] == folders
    assert first["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["CHOWN"]}
    rest = [*others, *specs["DaemonSet/demo-plexrl-node-h200"]["initContainers"]]
    assert all("runAsUser" not in each["securityContext"] for each in rest)


def test_policies_admit_nodes_of_the_host_network_the_operator_and_rljobs(tmp_path: Path) -> None:
    policies = of_kind(render(FULL, tmp_path), "NetworkPolicy")
    machines = {"ipBlock": {"cidr": "10.1.0.0/16"}}
    (rollout,) = policies["demo-plexrl-rollout"]["spec"]["ingress"]
    (routers,) = rollout["from"]
    assert routers["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "router"
    assert rollout["ports"] == [{"port": 7072, "protocol": "TCP"}]
    for name in ("scheduler", "issuer", "node"):
        assert machines in policies[f"demo-plexrl-{name}"]["spec"]["ingress"][0]["from"], name
    admitted = policies["demo-plexrl-router"]["spec"]["ingress"][0]["from"]
    own = {"app.kubernetes.io/name": "plexrl", "app.kubernetes.io/instance": "demo"}
    assert {"podSelector": {"matchLabels": own}} in admitted
    jobs = next(each for each in admitted if "namespaceSelector" in each)
    assert jobs["podSelector"]["matchExpressions"][0]["key"] == "plexrl.dev/rljob"
    namespaces = jobs["namespaceSelector"]["matchExpressions"][0]["values"]
    assert namespaces == ["team-a", "team-b"]
    pool = {"name": "a", "hostNetwork": True}
    values = {"nodePools": [pool], "networkPolicy": {"enabled": True}}
    assert "networkPolicy.nodesFrom" in refused(values, tmp_path)


def test_private_folders_lie_below_a_folder_of_their_own(tmp_path: Path) -> None:
    """An emptyDir is writable for all without a sticky bit, in which they would be refused."""
    objects = render({"nodePools": [{"name": "a"}], "data": {"url": "s3://b"}}, tmp_path)
    maps = of_kind(objects, "ConfigMap")
    router = json.loads(maps["demo-plexrl-router"]["data"]["router.json"])
    node = json.loads(maps["demo-plexrl-node-a"]["data"]["node.json"])
    paths = [router["data_dir"]]
    paths += [node["statemanager"][name] for name in ("host_dir", "nvme_dir")]
    paths += [node["statemanager"]["checkpoint_url"], node["agent"]["data_dir"]]
    specs = pod_specs(objects)
    mounts = {
        mount["mountPath"]
        for name in ("Deployment/demo-plexrl-router", "DaemonSet/demo-plexrl-node-a")
        for mount in specs[name]["containers"][0]["volumeMounts"]
    }
    assert not mounts & set(paths)
    assert not mounts & {str(Path(path).parent) for path in paths[1:3]}


def test_an_installation_with_own_keys_gets_none_of_the_chart(tmp_path: Path) -> None:
    specs = pod_specs(render(SHARED_VOLUME, tmp_path))
    secrets = {
        volume["secret"]["secretName"]
        for spec in specs.values()
        for volume in spec.get("volumes", ())
        if "secret" in volume
    }
    assert secrets == {"own-keys", "own-authority"}


def test_workers_as_pods_get_credentials_from_the_secret_alone(tmp_path: Path) -> None:
    maps = of_kind(render(FULL, tmp_path), "ConfigMap")
    node = json.loads(maps["demo-plexrl-node-cpu"]["data"]["node.json"])
    (worker,) = node["pods"]["template"]["containers"]
    assert worker["envFrom"] == [{"secretRef": {"name": "s3"}}]


def test_a_pool_with_other_gpus_has_another_template_since_none_can_be_changed(
    tmp_path: Path,
) -> None:
    pool = {"name": "a", "gpus": 4, "gpuDeviceClass": "gpu.nvidia.com"}
    names = [
        (*of_kind(render({"nodePools": [each]}, tmp_path), "ResourceClaimTemplate"),)
        for each in (pool, pool, {**pool, "gpus": 8}, {**pool, "gpuDeviceClass": "other.example"})
    ]
    assert names[0] == names[1]
    assert len({*names}) == 3
