"""deploy/kubernetes without a cluster: the services take what its containers start with.

The base is read as it stands; base and overlays also as ``kubectl kustomize`` renders them, where that is
installed. kubernetes-validate checks their form.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from hisparse_pd.base.settings_sources import load_settings
from hisparse_pd.commands import cli, pair
from hisparse_pd.router.live_page import PAGE_PATHS

Object = dict[str, Any]

BASE = Path(__file__).resolve().parents[3] / "deploy" / "kubernetes" / "base"
RENDERED = ("base", "overlays/gpu", "overlays/rdma", "overlays/machines")
OPEN_PATHS = {"/health", "/readiness", "/liveness", "/metrics", *PAGE_PATHS}
"""Paths that a probe may ask for, because they need no API key."""
OF_GROUPS = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "0", "LWS_LEADER_ADDRESS": "decode-0.decode"}
"""Environment that the controller of LeaderWorkerSets gives the pods of a group."""
END_SECS = 20.0
"""Longest time that a service takes after its drain: last answers, the engine's end, the transport's."""


def as_it_stands() -> list[Object]:
    """Return the objects of the base, with what its generators will add, under plain names."""
    kustomization = yaml.safe_load((BASE / "kustomization.yaml").read_text())
    found = [
        item for name in kustomization["resources"] for item in yaml.safe_load_all((BASE / name).read_text())
    ]
    for kind in ("ConfigMap", "Secret"):
        for made in kustomization[f"{kind[0].lower()}{kind[1:]}Generator"]:
            data = {
                Path(file).name: "" if kind == "Secret" else (BASE / file).read_text()
                for file in made["files"]
            }
            found.append({"kind": kind, "metadata": {"name": made["name"]}, "data": data})
    return found


@pytest.fixture(scope="module", params=["as it stands", *RENDERED])
def objects(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Object]:
    if request.param == "as it stands":
        return as_it_stands()
    if (kubectl := shutil.which("kubectl")) is None:
        pytest.skip("no kubectl, whose kustomize renders the overlays")
    copy = tmp_path_factory.mktemp("kubernetes") / "kubernetes"
    shutil.copytree(BASE.parent, copy)
    for name in ("control.key", "clients.keys", "nodes.keys"):
        (copy / "base" / "secrets" / name).write_text(f"{name} of the test, 0123456789\n")
    command = [kubectl, "kustomize", copy / request.param]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def workloads(objects: list[Object]) -> dict[str, Object]:
    """Return specs by role; a LeaderWorkerSet is shown as the StatefulSet of its groups' first pods."""
    found = {}
    for item in objects:
        name, spec = item["metadata"]["name"], item.get("spec", {})
        if item["kind"] in ("StatefulSet", "Deployment"):
            found[name] = spec
        elif item["kind"] == "LeaderWorkerSet":
            template = spec["leaderWorkerTemplate"]["leaderTemplate"]
            found[name] = {"template": template, "serviceName": name, "replicas": spec["replicas"]}
    assert set(found) == set(pair.SECTIONS)
    return found


def settings_of(role: str, objects: list[Object], tmp_path: Path) -> tuple[Any, dict[str, str]]:
    """Return the settings that a container's command line makes, and the texts of the files that it finds."""
    pod = workloads(objects)[role]["template"]["spec"]
    (own,) = pod["containers"]
    data = {item["metadata"]["name"]: item.get("data", {}) for item in objects}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    files: dict[str, str] = {}
    for mount in own["volumeMounts"]:
        volume = volumes[mount["name"]]
        name = volume.get("configMap", {}).get("name") or volume.get("secret", {}).get("secretName")
        files |= {f"{mount['mountPath']}/{file}": text for file, text in data.get(name, {}).items()}
        assert volume.get("secret", {"defaultMode": 0o440})["defaultMode"] == 0o440, "keys for others to read"
    environment = {entry["name"]: "10.0.0.7" for entry in own["env"]} | OF_GROUPS
    words = [re.sub(r"\$\((\w+)\)", lambda name: environment[name[1]], word) for word in own["args"]]
    namespace = cli.make_parser().parse_args(words)
    assert (own["command"], namespace.command) == (["hisparse-pd"], role)
    given = {name: value for name, value in vars(namespace).items() if name not in cli.NOT_SETTINGS}
    config = tmp_path / f"{role}-{namespace.config.name}"
    config.write_text(files[str(namespace.config)])
    return load_settings(pair.SECTIONS[role], given, config), files


@pytest.mark.parametrize("role", pair.SECTIONS)
def test_a_service_starts_with_the_ports_keys_and_time_of_its_pod(
    role: str, objects: list[Object], tmp_path: Path
) -> None:
    pod = workloads(objects)[role]["template"]["spec"]
    settings, files = settings_of(role, objects, tmp_path)
    (own,) = pod["containers"]
    names = {"http": "port"} | (
        {"bootstrap": "bootstrap_port", "control": "control_port"} if role == "prefill" else {}
    )
    ports = {port["name"]: port["containerPort"] for port in own["ports"]}
    assert ports == {name: getattr(settings, field) for name, field in names.items()}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert (own[probe]["httpGet"]["port"], own[probe]["httpGet"]["path"] in OPEN_PATHS) == ("http", True)
    assert str(settings.api_key_file) in files
    asleep = own["lifecycle"]["preStop"]["exec"]["command"][1] if "lifecycle" in own else 0
    assert pod["terminationGracePeriodSeconds"] >= settings.drain_timeout_secs + int(asleep) + END_SECS
    security = own["securityContext"]
    assert (security["readOnlyRootFilesystem"], security["capabilities"]["drop"]) == (True, ["ALL"])
    assert pod["automountServiceAccountToken"] is False
    # An added capability reaches root's processes only, and nothing else is a reason to be root.
    is_root = (pod["securityContext"] | security)["runAsUser"] == 0
    assert is_root is (security["capabilities"].get("add", []) == ["IPC_LOCK"])
    if role == "router":
        assert not any("control" in file for file in files), "a router needs no control key"
        return
    assert (settings.host, settings.advertise_host) == ("0.0.0.0", "10.0.0.7")
    assert str(settings.control_key_file) in files
    assert str(settings.model_path) in {mount["mountPath"] for mount in own["volumeMounts"]}
    memory = [own["resources"][of]["memory"] for of in ("requests", "limits")]
    assert memory[0] == memory[1], "registered memory cannot be taken back"


def test_the_router_knows_every_node_with_its_key_and_both_kinds_run_the_same_model(
    objects: list[Object], tmp_path: Path
) -> None:
    (router, files), (prefill, _), (decode, node_files) = (
        settings_of(role, objects, tmp_path) for role in ("router", "prefill", "decode")
    )
    for name in ("served_model_name", "page_size", "dtype", "kv_cache_dtype", "device", "transfer_protocol"):
        assert getattr(prefill, name) == getattr(decode, name), name
    services = {item["metadata"]["name"]: item["spec"] for item in objects if item["kind"] == "Service"}
    urls = {"prefill": [url for url, _ in router.prefill], "decode": router.decode}
    for role, node in (("prefill", prefill), ("decode", decode)):
        spec = workloads(objects)[role]
        assert services[spec["serviceName"]]["clusterIP"] == "None", "each pod needs a name of its own"
        hosts = {f"{role}-{pod}.{spec['serviceName']}:{node.port}" for pod in range(spec["replicas"])}
        assert {urlsplit(url).netloc for url in urls[role]} == hosts
    assert {port for _, port in router.prefill} == {prefill.bootstrap_port}
    assert files[str(router.node_api_key_file)] == node_files[str(decode.api_key_file)]
    assert router.node_api_key_file.name == decode.api_key_file.name != router.api_key_file.name


def test_services_budgets_and_policies_select_the_pods_that_they_are_for(objects: list[Object]) -> None:
    labels = {role: spec["template"]["metadata"]["labels"] for role, spec in workloads(objects).items()}

    def selected(plain: dict[str, str], expressions: list[Object]) -> set[str]:
        assert plain or expressions, "an empty selector takes in everything"
        return {
            role
            for role, of_pod in labels.items()
            if plain.items() <= of_pod.items()
            and all(of_pod.get(item["key"]) in item["values"] for item in expressions)
        }

    nodes = {"prefill", "decode"}
    for item in objects:
        kind, name, spec = item["kind"], item["metadata"]["name"], item.get("spec", {})
        expected = {"Service": {name}, "PodDisruptionBudget": {name}, "NetworkPolicy": nodes}.get(kind)
        if expected is not None:
            found = spec.get("podSelector") or spec["selector"]
            plain = found if kind == "Service" else found.get("matchLabels", {})
            assert selected(plain, found.get("matchExpressions", [])) == expected
    assert {"PodDisruptionBudget", "NetworkPolicy"} <= {item["kind"] for item in objects}


def test_all_machines_of_a_node_are_started_alike(objects: list[Object]) -> None:
    """All machines start alike except for HTTP, which the first one serves."""
    for item in objects:
        if item["kind"] == "LeaderWorkerSet":
            template = item["spec"]["leaderWorkerTemplate"]
            first, other = (template[name]["spec"] for name in ("leaderTemplate", "workerTemplate"))
            (own,) = first["containers"]
            of_http = {"ports", "startupProbe", "readinessProbe", "livenessProbe"}
            assert other == first | {"containers": [{key: own[key] for key in own.keys() - of_http}]}


def test_the_store_has_a_port_at_its_name_and_as_few_rights_as_the_services() -> None:
    text = (BASE.parent / "components" / "store" / "store.yaml").read_text()
    service, *deployments = yaml.safe_load_all(text)
    address = f"{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
    assert f"--master_server_address={address}" in text
    assert f"--rpc_port={service['spec']['ports'][0]['port']}" in text
    assert f'kv-store = "{address}"' in (BASE.parent / "components/store/kustomization.yaml").read_text()
    for deployment in deployments:
        pod = deployment["spec"]["template"]["spec"]
        security = pod["containers"][0]["securityContext"]
        assert (security["readOnlyRootFilesystem"], security["capabilities"]["drop"]) == (True, ["ALL"])
        assert (pod["securityContext"]["runAsNonRoot"], pod["automountServiceAccountToken"]) == (True, False)


def test_keys_are_never_committed() -> None:
    assert "*" in (BASE / "secrets" / ".gitignore").read_text().splitlines()


def test_objects_fit_the_schemas_of_kubernetes(objects: list[Object], tmp_path: Path) -> None:
    if (validator := shutil.which("kubernetes-validate")) is None:
        pytest.skip("no kubernetes-validate; `pip install kubernetes-validate` has the schemas with it")
    path = tmp_path / "objects.yaml"
    custom = ("PodMonitor", "LeaderWorkerSet")
    known = [item for item in objects if "apiVersion" in item and item["kind"] not in custom]
    path.write_text(yaml.safe_dump_all(known))
    done = subprocess.run([validator, "--strict", path], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
