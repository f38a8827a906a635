"""deploy/kubernetes without a cluster: files that are there, references that resolve, options that are taken.

The base is checked as it stands; base and overlays also as ``kubectl kustomize`` renders them, where it is.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from pydantic import BaseModel

import hisparse_pd
from router.live_page import PAGE_PATHS
from service.settings import DecodeSettings, NodeSettings, PrefillSettings, RouterSettings
from service.settings_sources import load_settings

Object = dict[str, Any]

KUBERNETES = Path(__file__).resolve().parents[3] / "deploy" / "kubernetes"
OVERLAYS = ("base", "overlays/gpu", "overlays/rdma", "overlays/machines")
SECRET_FILES = ("control.key", "clients.keys", "nodes.keys")
MODELS: dict[str, type[BaseModel]] = {
    "prefill": PrefillSettings,
    "decode": DecodeSettings,
    "router": RouterSettings,
}
ROUTER_PATHS = {"/health", "/readiness", "/liveness", "/metrics", *PAGE_PATHS}
NODE_PATHS = {"/health", "/liveness", "/metrics"}
"""What a probe may ask for: no API key is needed there."""

CUSTOM_KINDS = ("PodMonitor", "LeaderWorkerSet")

OF_GROUPS = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "0", "LWS_LEADER_ADDRESS": "decode-0.decode"}
"""What the controller of LeaderWorkerSets tells the pods of a group."""

END_SECS = 20.0
"""What a service takes after its drain at most: last answers, the engine's end, the transport's."""

KUBECTL = shutil.which("kubectl")
VALIDATOR = shutil.which("kubernetes-validate")


# --- what is there -----------------------------------------------------------------------------------


def _kustomizations() -> list[Path]:
    return sorted(KUBERNETES.rglob("kustomization.yaml"))


def _as_they_stand() -> list[Object]:
    """The objects of the base, with what its generators will add, under plain names."""
    kustomization = _load(KUBERNETES / "base" / "kustomization.yaml")
    objects = [
        found
        for name in kustomization["resources"]
        for found in yaml.safe_load_all((KUBERNETES / "base" / name).read_text(encoding="utf-8"))
    ]
    for kind in ("ConfigMap", "Secret"):
        for generator in kustomization[f"{kind[0].lower()}{kind[1:]}Generator"]:
            data = {Path(file).name: _text(KUBERNETES / "base" / file) for file in generator["files"]}
            objects.append({"kind": kind, "metadata": {"name": generator["name"]}, "data": data})
    return objects


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.parent.name != "secrets" else ""


def _load(path: Path) -> Object:
    loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(loaded, dict), path
    return loaded


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Object]]:
    """The objects of base and overlays, by directory."""
    if KUBECTL is None:
        pytest.skip("no kubectl, whose kustomize renders the overlays")
    copy = tmp_path_factory.mktemp("kubernetes") / "kubernetes"
    shutil.copytree(KUBERNETES, copy)
    for name in SECRET_FILES:
        (copy / "base" / "secrets" / name).write_text(f"{name} of the test, 0123456789\n")
    found = {}
    for overlay in OVERLAYS:
        done = subprocess.run(
            [KUBECTL, "kustomize", copy / overlay], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        assert "deprecated" not in done.stderr
        found[overlay] = list(yaml.safe_load_all(done.stdout))
    return found


@pytest.fixture(params=["as it stands", *OVERLAYS])
def objects(request: pytest.FixtureRequest) -> list[Object]:
    """The objects of one directory."""
    if request.param == "as it stands":
        return _as_they_stand()
    found: list[Object] = request.getfixturevalue("rendered")[request.param]
    return found


def _of_kind(objects: list[Object], *kinds: str) -> list[Object]:
    return [found for found in objects if found["kind"] in kinds]


def _workloads(objects: list[Object]) -> dict[str, Object]:
    found = {item["metadata"]["name"]: item for item in _of_kind(objects, "StatefulSet", "Deployment")}
    found |= {
        item["metadata"]["name"]: _of_first_machines(item) for item in _of_kind(objects, "LeaderWorkerSet")
    }
    assert set(found) == set(MODELS)
    return found


def _of_first_machines(groups: Object) -> Object:
    """A LeaderWorkerSet as the StatefulSet of its groups' first pods, which its controller makes of it."""
    template = groups["spec"]["leaderWorkerTemplate"]["leaderTemplate"]
    spec = {
        "template": template,
        "selector": {"matchLabels": template["metadata"]["labels"]},
        "serviceName": groups["metadata"]["name"],
        "replicas": groups["spec"]["replicas"],
    }
    return groups | {"spec": spec}


def _pod(workload: Object) -> Object:
    spec: Object = workload["spec"]["template"]["spec"]
    return spec


def _container(workload: Object) -> Object:
    (container,) = _pod(workload)["containers"]
    found: Object = container
    return found


def _port_names(workload: Object) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in _container(workload)["ports"]}


def _matches(selector: Object, labels: dict[str, str]) -> bool:
    """Of matchLabels and of matchExpressions with the operator In."""
    plain = selector.get("matchLabels", {})
    expressions = selector.get("matchExpressions", ())
    assert plain or expressions, "an empty selector takes in everything"
    return all(labels.get(key) == value for key, value in plain.items()) and all(
        labels.get(item["key"]) in item["values"] for item in expressions if item["operator"] == "In"
    )


# --- files -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", _kustomizations(), ids=lambda path: path.parent.name)
def test_what_a_kustomization_names_is_there(path: Path) -> None:
    kustomization = _load(path)
    expected = {"base": "Kustomization", "overlays": "Kustomization", "components": "Component"}
    assert kustomization["kind"] == expected[path.relative_to(KUBERNETES).parts[0]]
    names = [*kustomization.get("resources", ()), *kustomization.get("components", ())]
    names += [patch["path"] for patch in kustomization.get("patches", ())]
    for generator in kustomization.get("configMapGenerator", ()):
        names += generator["files"]
    for name in names:
        target = path.parent / name
        assert target.is_file() or (target / "kustomization.yaml").is_file(), f"{path}: {name} is not there"


def test_every_file_is_named_by_a_kustomization_and_parses() -> None:
    named = {
        (path.parent / name).resolve()
        for path in _kustomizations()
        for name in re.findall(r"[\w./-]+\.(?:yaml|toml)", path.read_text(encoding="utf-8"))
    }
    for file in KUBERNETES.rglob("*"):
        if file.suffix == ".yaml" and file.name != "kustomization.yaml":
            assert file in named, f"{file} belongs to nothing"
            assert list(yaml.safe_load_all(file.read_text(encoding="utf-8")))
        if file.suffix == ".toml":
            assert file in named, f"{file} belongs to nothing"
            tomllib.loads(file.read_text(encoding="utf-8"))


def test_keys_are_made_as_the_readme_says_and_never_committed() -> None:
    generators = _load(KUBERNETES / "base" / "kustomization.yaml")["secretGenerator"]
    files = [file for generator in generators for file in generator["files"]]
    assert sorted(Path(file).name for file in files) == sorted(SECRET_FILES)
    readme = (KUBERNETES / "README.md").read_text(encoding="utf-8")
    for file in files:
        assert re.search(rf"hisparse-pd keygen (?:--api)? *base/{re.escape(file)}", readme), file
    ignored = (KUBERNETES / "base" / "secrets" / ".gitignore").read_text(encoding="utf-8").splitlines()
    assert "*" in ignored


# --- references --------------------------------------------------------------------------------------


def test_selectors_find_their_pods(objects: list[Object]) -> None:
    workloads = _workloads(objects)
    labels = {role: item["spec"]["template"]["metadata"]["labels"] for role, item in workloads.items()}
    for role, item in workloads.items():
        assert _matches(item["spec"]["selector"], labels[role])
        for constraint in _pod(item).get("topologySpreadConstraints", ()):
            assert _matches(constraint["labelSelector"], labels[role])
    for service in _of_kind(objects, "Service"):
        selector = {"matchLabels": service["spec"]["selector"]}
        assert [role for role in labels if _matches(selector, labels[role])] == [service["metadata"]["name"]]
    for budget in _of_kind(objects, "PodDisruptionBudget"):
        selector = budget["spec"]["selector"]
        assert [role for role in labels if _matches(selector, labels[role])] == [budget["metadata"]["name"]]
    for policy in _of_kind(objects, "NetworkPolicy"):
        chosen = [role for role in labels if _matches(policy["spec"]["podSelector"], labels[role])]
        assert sorted(chosen) == ["decode", "prefill"]
    for monitor in _of_kind(objects, "PodMonitor"):
        assert all(_matches(monitor["spec"]["selector"], label) for label in labels.values())
        assert all(label[monitor["spec"]["jobLabel"]] == role for role, label in labels.items())


def test_ports_are_where_services_probes_and_policies_look(objects: list[Object]) -> None:
    workloads = _workloads(objects)
    for service in _of_kind(objects, "Service"):
        ports = _port_names(workloads[service["metadata"]["name"]])
        for port in service["spec"]["ports"]:
            assert port["targetPort"] in ports
            assert port["port"] == ports[port["targetPort"]]
    for role, item in workloads.items():
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            asked = _container(item)[probe]["httpGet"]
            assert asked["port"] in _port_names(item)
            assert asked["path"] in (ROUTER_PATHS if role == "router" else NODE_PATHS)
    for policy in _of_kind(objects, "NetworkPolicy"):
        for rule in policy["spec"]["ingress"]:
            for port in rule.get("ports", ()):
                assert all(port["port"] in _port_names(workloads[role]) for role in ("prefill", "decode"))
    for monitor in _of_kind(objects, "PodMonitor"):
        for endpoint in monitor["spec"]["podMetricsEndpoints"]:
            assert all(endpoint["port"] in _port_names(item) for item in workloads.values())


def test_mounts_and_what_they_mount_exist(objects: list[Object]) -> None:
    there = {(found["kind"], found["metadata"]["name"]) for found in objects}
    for item in _workloads(objects).values():
        volumes = {volume["name"]: volume for volume in _pod(item)["volumes"]}
        mounted = {mount["name"] for mount in _container(item)["volumeMounts"]}
        assert mounted == set(volumes)
        for volume in volumes.values():
            match volume:
                case {"configMap": {"name": name}}:
                    assert ("ConfigMap", name) in there
                case {"secret": {"secretName": name, "defaultMode": mode}}:
                    assert ("Secret", name) in there
                    assert mode == 0o440, "keys are for the group of the pod and nobody else"
                case {"persistentVolumeClaim": {"claimName": name}}:
                    assert ("PersistentVolumeClaim", name) in there
                case {"emptyDir": {"sizeLimit": _}}:
                    pass
                case _:
                    pytest.fail(f"a volume of another kind: {volume}")
    names = [(found["kind"], found["metadata"]["name"]) for found in objects]
    assert len(names) == len(set(names))


# --- options -----------------------------------------------------------------------------------------


def _files_in(workload: Object, objects: list[Object]) -> dict[str, str]:
    """Paths in the container of what ConfigMaps and Secrets put there, with their text."""
    data = {(found["kind"], found["metadata"]["name"]): found.get("data", {}) for found in objects}
    sources = {
        volume["name"]: ("ConfigMap", volume["configMap"]["name"])
        if "configMap" in volume
        else ("Secret", volume["secret"]["secretName"])
        for volume in _pod(workload)["volumes"]
        if "configMap" in volume or "secret" in volume
    }
    return {
        f"{mount['mountPath']}/{name}": text
        for mount in _container(workload)["volumeMounts"]
        if mount["name"] in sources
        for name, text in data[sources[mount["name"]]].items()
    }


def _settings(role: str, objects: list[Object], tmp_path: Path) -> tuple[Any, dict[str, str]]:
    """What the container's command line means to the service, and the files that it finds."""
    workload = _workloads(objects)[role]
    container, files = _container(workload), _files_in(workload, objects)
    assert container["command"] == ["hisparse-pd"]
    environment = {entry["name"] for entry in container["env"]} | set(OF_GROUPS)
    words = []
    for word in container["args"]:
        assert set(re.findall(r"\$\((\w+)\)", word)) <= environment
        words.append(re.sub(r"\$\((\w+)\)", lambda name: OF_GROUPS.get(name[1], "10.0.0.7"), word))
    parser = hisparse_pd._make_parser()
    namespace, unknown = parser.parse_known_args(words)
    assert not unknown
    assert namespace.command == role
    given = {
        name: value for name, value in vars(namespace).items() if name not in ("parser", "command", "config")
    }
    config = tmp_path / namespace.config.name
    config.write_text(files[str(namespace.config)])
    return load_settings(MODELS[role], given, config), files


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_nodes_options_are_accepted_and_fit_its_pod(
    role: str, objects: list[Object], tmp_path: Path
) -> None:
    settings, files = _settings(role, objects, tmp_path)
    assert isinstance(settings, NodeSettings)
    workload = _workloads(objects)[role]
    ports = {"http": settings.port}
    if isinstance(settings, PrefillSettings):
        ports |= {"bootstrap": settings.bootstrap_port, "control": settings.control_port}
    assert _port_names(workload) == ports
    assert settings.host == "0.0.0.0"
    assert settings.advertise_host == "10.0.0.7"
    assert str(settings.control_key_file) in files
    assert str(settings.api_key_file) in files
    assert str(settings.model_path) in {mount["mountPath"] for mount in _container(workload)["volumeMounts"]}


def test_both_kinds_of_nodes_run_the_same_model(objects: list[Object], tmp_path: Path) -> None:
    prefill, decode = (_settings(role, objects, tmp_path)[0] for role in ("prefill", "decode"))
    for name in ("served_model_name", "page_size", "dtype", "kv_cache_dtype", "device", "transfer_protocol"):
        assert getattr(prefill, name) == getattr(decode, name), name


def test_the_router_knows_every_node_and_no_other(objects: list[Object], tmp_path: Path) -> None:
    settings, files = _settings("router", objects, tmp_path)
    workloads = _workloads(objects)
    services = {service["metadata"]["name"]: service for service in _of_kind(objects, "Service")}
    urls = {"prefill": [url for url, _ in settings.prefill], "decode": list(settings.decode)}
    for role in ("prefill", "decode"):
        item = workloads[role]
        service = services[item["spec"]["serviceName"]]
        assert service["spec"]["clusterIP"] == "None", "each pod needs a name of its own"
        hosts = {f"{role}-{pod}.{service['metadata']['name']}" for pod in range(item["spec"]["replicas"])}
        assert {urlsplit(url).hostname for url in urls[role]} == hosts
        assert {urlsplit(url).port for url in urls[role]} == {_port_names(item)["http"]}
    assert {port for _, port in settings.prefill} == {_port_names(workloads["prefill"])["bootstrap"]}
    assert _port_names(workloads["router"]) == {"http": settings.port}
    assert str(settings.api_key_file) in files
    assert str(settings.node_api_key_file) in files
    node, node_files = _settings("decode", objects, tmp_path)
    node_keys = str(settings.node_api_key_file), str(node.api_key_file)
    assert Path(node_keys[0]).name == Path(node_keys[1]).name, "the routers' key for the nodes is another one"
    assert not any("control" in file for file in files), "a router needs no control key"
    assert files[node_keys[0]] == node_files[node_keys[1]]


# --- security and lifetime ---------------------------------------------------------------------------


def test_pods_may_do_what_they_need_and_no_more(objects: list[Object]) -> None:
    for role, item in _workloads(objects).items():
        pod, container = _pod(item), _container(item)
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
        own = container["securityContext"]
        assert own["readOnlyRootFilesystem"] is True
        assert own["allowPrivilegeEscalation"] is False
        assert own["capabilities"]["drop"] == ["ALL"]
        assert "privileged" not in own
        added = own["capabilities"].get("add", [])
        runs_as_root = own.get("runAsUser", pod["securityContext"]["runAsUser"]) == 0
        # A capability that is added reaches root's processes only, and nothing else is a reason to be root.
        assert runs_as_root is (added == ["IPC_LOCK"])
        assert runs_as_root or (pod["securityContext"]["runAsNonRoot"] is True and not added)
        if runs_as_root:
            assert "--transfer-protocol=rdma" in container["args"]
        assert "memory" in container["resources"]["limits"]
        assert (
            role == "router"
            or container["resources"]["requests"]["memory"] == (container["resources"]["limits"]["memory"])
        ), "registered memory cannot be taken back"


@pytest.mark.parametrize("role", MODELS)
def test_a_pod_has_the_time_that_its_service_takes_to_end(
    role: str, objects: list[Object], tmp_path: Path
) -> None:
    workload = _workloads(objects)[role]
    needed = _settings(role, objects, tmp_path)[0].drain_timeout_secs + END_SECS
    match _container(workload).get("lifecycle"):
        case {"preStop": {"exec": {"command": ["sleep", secs]}}}:
            needed += int(secs)
        case None:
            pass
        case other:
            pytest.fail(f"what takes how long: {other}")
    assert _pod(workload)["terminationGracePeriodSeconds"] >= needed


# --- overlays ----------------------------------------------------------------------------------------


def test_overlays_differ_from_the_base_in_what_they_are_for(rendered: dict[str, list[Object]]) -> None:
    base, gpu, rdma, machines = (_workloads(rendered[overlay]) for overlay in OVERLAYS)
    for role in ("prefill", "decode"):
        limits = [_container(workloads[role])["resources"]["limits"] for workloads in (base, gpu, rdma)]
        assert [any(name.startswith("nvidia.com/gpu") for name in limit) for limit in limits] == [
            False,
            True,
            True,
        ]
        assert [any(name.startswith("rdma/") for name in limit) for limit in limits] == [False, False, True]
        assert "--dp-size=16" in _container(machines[role])["args"]
    assert _container(gpu["router"]) | {"image": ""} == _container(base["router"]) | {"image": ""}
    assert not _of_kind(rendered["base"], "PodMonitor")
    assert _of_kind(rendered["overlays/gpu"], "PodMonitor")
    assert _of_kind(rendered["overlays/rdma"], "PodMonitor")


def test_all_machines_of_a_node_are_started_alike(rendered: dict[str, list[Object]]) -> None:
    """But for what serves HTTP, which the first one does."""
    groups = _of_kind(rendered["overlays/machines"], "LeaderWorkerSet")
    assert {group["metadata"]["name"] for group in groups} == {"prefill", "decode"}
    for group in groups:
        template = group["spec"]["leaderWorkerTemplate"]
        assert template["size"] == int(OF_GROUPS["LWS_GROUP_SIZE"])
        assert template["restartPolicy"] == "RecreateGroupOnPodRestart"
        first, other = (template[name]["spec"] for name in ("leaderTemplate", "workerTemplate"))
        of_http = ("ports", "startupProbe", "readinessProbe", "livenessProbe")
        (container,) = first["containers"]
        assert set(of_http) <= set(container)
        rest = {key: value for key, value in container.items() if key not in of_http}
        assert other == first | {"containers": [rest]}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_objects_fit_the_schemas_of_kubernetes(
    overlay: str, rendered: dict[str, list[Object]], tmp_path: Path
) -> None:
    if VALIDATOR is None:
        pytest.skip("no kubernetes-validate; `pip install kubernetes-validate` has the schemas with it")
    path = tmp_path / "objects.yaml"
    known: Iterator[Object] = (item for item in rendered[overlay] if item["kind"] not in CUSTOM_KINDS)
    path.write_text(yaml.safe_dump_all(known))
    done = subprocess.run([VALIDATOR, "--strict", path], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
