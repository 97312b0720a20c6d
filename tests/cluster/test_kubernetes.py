"""Kubernetes manifests, compared with golden files and JSON schemas; and the kubectl commands, with a fake
kubectl.

    pytest tests/cluster/test_kubernetes.py
    python -m tests.cluster.test_kubernetes        rewrite the golden files
"""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from toolkit.cluster.jobs import backends
from toolkit.cluster.jobs.backends import kubernetes, kubernetes_manifests
from toolkit.cluster.jobs.job import CONFIG_FILE, JobId, JobState, TrainingJob, create_job, plan_job
from toolkit.cluster.jobs.pod import LEFT_RUN
from toolkit.config.cluster import ClusterBackend, ClusterConfig, KubernetesConfig
from toolkit.config.compose import compose, from_yaml, to_yaml
from toolkit.config.schema import RunConfig, RunSection
from toolkit.errors import ConfigError, InputError
from toolkit.plan.types import Device, World

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "kubernetes"
SCHEMAS = Path(__file__).with_name("schemas")


def job(
    nodes: int = 1,
    gpus: int = 8,
    *,
    run_dir: str = "runs/gpt-0123abcd",
    number: int = 1,
    name: str | None = None,
    grace: int = 60,
    min_nodes: int | None = None,
    spare_nodes: int = 0,
    **keys: Any,
) -> TrainingJob:
    own = KubernetesConfig(
        **{"image": "registry.example/toolkit:1.0", "volumes": {"/workspace": "training"}, **keys}
    )
    cluster = ClusterConfig(
        where=ClusterBackend.kubernetes,
        nodes=nodes,
        min_nodes=min_nodes,
        spare_nodes=spare_nodes,
        gpus_per_node=gpus,
        grace_seconds=grace,
        kubernetes=own,
    )
    config = RunConfig(run=RunSection(name="gpt", dir=run_dir), cluster=cluster)
    world = World(
        ranks=nodes * (gpus or 1), ranks_per_node=gpus or 1, device=Device.CUDA if gpus else Device.CPU
    )
    return TrainingJob(
        name=name or Path(run_dir).name,
        run_dir=run_dir,
        number=number,
        config=config,
        world=world,
        script="/laptop/train.py",
    )


ALL = job(
    4,
    run_dir="/data/runs/Große Läufe, 2",
    namespace="research",
    queue="gpus",
    priority_class="urgent",
    shared_memory_gib=64,
    rdma={"rdma/hca_shared_devices": 8},
    secrets={"WANDB_API_KEY": "wandb/api-key", "AWS_SECRET_ACCESS_KEY": "store/secret"},
    volumes={"/workspace": "scratch", "/data": "training", "/archive": "training"},
    service_account="trainer",
    node_selector={"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3", "pool": "train"},
    cpus=96,
    memory_gib=1024,
    grace=300,
    environment={"NCCL_DEBUG": "WARN", "NCCL_IB_HCA": "=mlx5_0,mlx5_1", "PROMPT": "$(HOME)"},
    image_pull_secrets=["registry"],
    ttl_seconds=86_400,
    annotations={"prometheus.io/scrape": "false"},
    topology="cloud.example.com/rack",
    affinity={
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [
                    {"matchExpressions": [{"key": "pool", "operator": "NotIn", "values": ["old"]}]}
                ]
            }
        }
    },
    tolerations=[{"key": "dedicated", "operator": "Equal", "value": "train", "effect": "NoSchedule"}],
    extra_volumes={
        "/scratch": {"hostPath": {"path": "/mnt/nvme", "type": "Directory"}},
        "/home": {"nfs": {"server": "10.0.0.2", "path": "/home"}},
    },
)
CASES = {
    "one_node.yaml": job(),
    "four_nodes.yaml": ALL,
    "elastic.yaml": job(4, min_nodes=2, spare_nodes=1, cpus=16, node_selector={"pool": "train"}),
    "cpu.yaml": job(2, 0, priority_class="low", topology="topology.kubernetes.io/zone"),
}


def documents(of: TrainingJob) -> tuple[dict[str, Any], dict[str, Any]]:
    config_map, job_set = yaml.safe_load_all(kubernetes.render(of)[kubernetes.MANIFEST_FILE])
    return config_map, job_set


def golden(of: TrainingJob) -> str:
    """The manifest without the configuration, which changes with every new key."""
    text = kubernetes.render(of)[kubernetes.MANIFEST_FILE]
    return re.sub(r"(?<=config\.yaml: \|\n)(?:    .*\n)+", "    (the frozen configuration)\n", text)


def pod_of(job_set: Mapping[str, Any]) -> dict[str, Any]:
    replicated = job_set["spec"]["replicatedJobs"][-1]
    pod: dict[str, Any] = replicated["template"]["spec"]["template"]["spec"]
    return pod


@pytest.mark.parametrize("name", CASES)
def test_manifest_matches_golden_file(name: str) -> None:
    assert golden(CASES[name]) == (GOLDEN / name).read_text(encoding="utf-8")


# ---- schemas


def strict(schema: Any) -> Any:
    """``schema`` with unknown fields rejected, like the API server does for kubectl
    (fieldValidation=Strict).
    """
    if isinstance(schema, dict):
        found = {key: strict(value) for key, value in schema.items()}
        if isinstance(schema.get("properties"), dict) and not schema.get(
            "x-kubernetes-preserve-unknown-fields"
        ):
            found.setdefault("additionalProperties", False)
        return found
    return [strict(value) for value in schema] if isinstance(schema, list) else schema


def validators() -> tuple[Callable[[Any], list[str]], Callable[[str], Callable[[Any], list[str]]]]:
    """Validators for JobSets and for each kind of Kubernetes; each returns the errors of a document."""
    jsonschema = pytest.importorskip(
        "jsonschema", reason="no manifest was held against the schemas: pip install jsonschema"
    )
    crd = strict(json.loads((SCHEMAS / "jobset-v1alpha2.json").read_text()))
    crd["properties"]["metadata"] = {"type": "object"}  # ObjectMeta is in the schema of Kubernetes
    core = json.loads((SCHEMAS / "kubernetes-1.37.json").read_text())

    def errors(schema: Any) -> Callable[[Any], list[str]]:
        validator = jsonschema.Draft202012Validator(schema)
        return lambda document: [
            f"{error.json_path}: {error.message}" for error in validator.iter_errors(document)
        ]

    return errors(crd), lambda kind: errors({"$ref": f"#/definitions/{kind}", **core})


@pytest.mark.parametrize("name", CASES)
def test_manifests_match_the_schemas(name: str) -> None:
    job_set_errors, kind = validators()
    config_map, job_set = documents(CASES[name])
    assert job_set_errors(job_set) == []
    assert kind("io.k8s.api.core.v1.ConfigMap")(config_map) == []
    assert kind("io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta")(job_set["metadata"]) == []
    for replicated in job_set["spec"]["replicatedJobs"]:
        as_job = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": "x"},
            "spec": replicated["template"]["spec"],
        }
        assert kind("io.k8s.api.batch.v1.Job")(as_job) == []


@pytest.mark.parametrize("wrong", ["field", "type", "enum", "pod"])
def test_control_invalid_manifest_fails_the_schema(wrong: str) -> None:
    job_set_errors, _ = validators()
    job_set = copy.deepcopy(documents(ALL)[1])
    spec = job_set["spec"]
    match wrong:
        case "field":
            spec["failurePolicy"]["maximumRestarts"] = 3
        case "type":
            spec["failurePolicy"]["maxRestarts"] = "3"
        case "enum":
            spec["failurePolicy"]["rules"][0]["action"] = "Fail"
        case "pod":
            pod_of(job_set)["containers"][0]["securityContext"]["nonRoot"] = True
    assert len(job_set_errors(job_set)) == 1


# ---- contents


def test_pods_are_unprivileged_and_manifests_contain_no_secrets() -> None:
    config_map, job_set = documents(ALL)
    pod = pod_of(job_set)
    (container,) = pod["containers"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == 1000
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    referenced = {entry["name"] for entry in container["env"] if set(entry) == {"name", "valueFrom"}}
    assert referenced == {"JOBSET_RESTART", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY"}
    for privileged in ("hostNetwork", "hostPID", "hostIPC", "privileged"):
        assert privileged not in json.dumps(job_set)
    assert "hostPath" not in json.dumps(documents(CASES["one_node.yaml"])[1]), "only if the user asks for one"
    assert config_map["immutable"] is True


def test_multi_node_job_uses_first_pod_as_rendezvous() -> None:
    _, job_set = documents(ALL)
    name = job_set["metadata"]["name"]
    (replicated,) = job_set["spec"]["replicatedJobs"]
    spec = replicated["template"]["spec"]
    assert (spec["completions"], spec["parallelism"], spec["completionMode"], spec["backoffLimit"]) == (
        4,
        4,
        "Indexed",
        0,
    )
    assert f"--meet={name}-node-0-0.{name}:29400" in pod_of(job_set)["containers"][0]["command"]
    assert job_set["spec"]["network"]["subdomain"] == name
    assert not any(word.startswith("--meet") for word in kubernetes_manifests.container_command(job()))


def test_elastic_job_replaces_single_pods_and_serves_the_rendezvous_apart_from_them() -> None:
    _, job_set = documents(CASES["elastic.yaml"])
    name = job_set["metadata"]["name"]
    server, nodes = (each["template"]["spec"] for each in job_set["spec"]["replicatedJobs"])
    assert (nodes["completions"], nodes["parallelism"]) == (5, 5), "with the spare node"
    assert nodes["backoffLimit"] == 3 + 3, "cluster.restarts, and the nodes that may be lost"
    assert nodes["successPolicy"] == {"rules": [{"succeededCount": 1}]}
    actions = [
        (rule["action"], *rule.get("onExitCodes", {}).get("values", ["disruption"]))
        for rule in nodes["podFailurePolicy"]["rules"]
    ]
    assert actions == [("FailJob", 2), ("Ignore", "disruption"), ("FailJob", 75), ("FailJob", 1)]
    assert LEFT_RUN not in {code for _, code in actions}, "the pod is replaced, and counts"
    assert f"--meet={name}-rendezvous-0-0.{name}:29400" in pod_of(job_set)["containers"][0]["command"]
    small = server["template"]["spec"]
    assert "nodeSelector" not in small
    assert small["containers"][0]["resources"] == {"requests": {"cpu": 1}}
    assert small["containers"][0]["command"][-2:] == ["29400", "--id=start-$(JOBSET_RESTART)"]
    assert small["securityContext"] == pod_of(job_set)["securityContext"]
    assert job_set["spec"]["successPolicy"] == {"operator": "All", "targetReplicatedJobs": ["node"]}


def test_failure_rules_act_on_exit_codes() -> None:
    """Matches the messages of Kubernetes' Job controller (pkg/controller/job/pod_failure_policy.go,
    v1.31).
    """
    _, job_set = documents(ALL)
    rules = job_set["spec"]["failurePolicy"]["rules"]
    assert job_set["spec"]["failurePolicy"]["maxRestarts"] == ALL.config.cluster.restarts == 3

    def action(message: str) -> str | None:
        found = (
            rule["action"]
            for rule in rules
            for pattern in rule["onJobFailureMessagePatterns"]
            if re.search(pattern, message)
        )
        return next(found, None)

    failed = (
        "Container trainer for pod research/gpt-node-0-2-x7k2p failed with exit code {} "
        "matching FailJob rule at index 0"
    )
    assert action(failed.format(2)) == "FailJobSet"
    assert action(failed.format(75)) == "RestartJobSetAndIgnoreMaxRestarts"
    assert action(failed.format(127)) is None  # so it is restarted, and counted
    assert action(failed.format(25)) is None
    disrupted = (
        "Pod research/gpt-node-0-2-x7k2p has condition DisruptionTarget matching FailJob rule at index 2"
    )
    assert action(disrupted) == "RestartJobSetAndIgnoreMaxRestarts"


def test_grace_period_allows_saving() -> None:
    assert pod_of(documents(ALL)[1])["terminationGracePeriodSeconds"] == 330
    assert pod_of(documents(job())[1])["terminationGracePeriodSeconds"] == 90


def test_priority_class_of_kueue_or_kubernetes() -> None:
    _, queued = documents(ALL)
    assert queued["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
    assert queued["metadata"]["labels"]["kueue.x-k8s.io/priority-class"] == "urgent"
    assert "priorityClassName" not in pod_of(queued)
    _, plain = documents(job(priority_class="urgent"))
    assert not any("kueue" in label for label in plain["metadata"]["labels"])
    assert pod_of(plain)["priorityClassName"] == "urgent"


@pytest.mark.parametrize("name", ["gpt", "7b", "Große Läufe, 2", "x" * 200, "--", "a.b_c", "$(HOSTNAME)"])
def test_object_names_are_short_dns_labels(name: str) -> None:
    found = kubernetes.object_name(job(name=name))
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", found), found
    assert len(f"{found}-node-0-9999-abcde") <= 63


def test_object_names_are_unique_per_job() -> None:
    jobs = [
        job(),
        job(number=2),
        job(run_dir="runs/Gpt-0123abcd"),
        job(run_dir="runs/gpt-0123abcd/x", name="gpt-0123abcd"),
    ]
    assert len({kubernetes.object_name(each) for each in jobs}) == 4


def test_configuration_survives_the_config_map() -> None:
    """Values that YAML or Kubernetes could alter arrive unchanged; equal to a local run except for cluster
    and run.dir.
    """
    words = [
        "+exp=quickstart",
        "monitor.prompt='a: \"b\" $(HOSTNAME) # c\n- d'",
        "cluster=kubernetes",
        "cluster.gpus_per_node=0",
    ]
    config = compose(words)
    own = replace(config.cluster, kubernetes=job().config.cluster.kubernetes)
    frozen = replace(config, cluster=own, run=replace(config.run, dir="runs/a"))
    of = replace(job(), config=frozen)
    config_map, _ = documents(of)
    arrived = from_yaml(config_map["data"][CONFIG_FILE])
    assert to_yaml(arrived) == to_yaml(frozen) == kubernetes.render(of)[CONFIG_FILE]
    here = compose(words[:2])
    assert replace(arrived, cluster=here.cluster, run=replace(arrived.run, dir=None)) == here


# ---- rejected before anything is written

REFUSED: dict[str, tuple[TrainingJob, str]] = {
    "no image": (job(image=None), "cluster.kubernetes.image"),
    "image of two words": (job(image="toolkit: 1"), "cluster.kubernetes.image"),
    "no volume": (job(volumes={}), "cluster.kubernetes.volumes"),
    "another volume": (job(volumes={"/data": "training"}), "cluster.kubernetes.volumes"),
    "out of the volume": (job(run_dir="../runs/x"), "cluster.kubernetes.volumes"),
    "a relative place": (
        job(volumes={"/workspace": "training", "data": "training"}),
        "cluster.kubernetes.volumes",
    ),
    "over the configuration": (
        job(volumes={"/workspace": "training", "/etc": "training"}),
        "cluster.kubernetes.volumes",
    ),
    "over the toolkit": (
        job(volumes={"/workspace": "training", "/opt": "training"}),
        "cluster.kubernetes.volumes",
    ),
    "claim": (job(volumes={"/workspace": "Training"}), "cluster.kubernetes.volumes"),
    "queue": (job(queue="my queue"), "cluster.kubernetes.queue"),
    "namespace": (job(namespace="a.b"), "cluster.kubernetes.namespace"),
    "memory": (job(memory_gib=16), "cluster.kubernetes.memory_gib"),
    "shared memory": (job(shared_memory_gib=0), "cluster.kubernetes.shared_memory_gib"),
    "device": (job(rdma={"hca": 1}), "cluster.kubernetes.rdma"),
    "label": (job(node_selector={"pool": "a b"}), "cluster.kubernetes.node_selector"),
    "variable": (job(secrets={"A-B": "wandb/key"}), "cluster.kubernetes.secrets"),
    "name of an environment variable": (job(environment={"A-B": "1"}), "cluster.kubernetes.environment"),
    "variable of the launcher": (job(environment={"WORLD_SIZE": "8"}), "cluster.kubernetes.environment"),
    "secret in the environment": (
        job(environment={"WANDB_API_KEY": "0123"}),
        "cluster.kubernetes.environment",
    ),
    "variable set twice": (
        job(environment={"A": "1"}, secrets={"A": "store/a"}),
        "cluster.kubernetes.environment",
    ),
    "time to live": (job(ttl_seconds=-1), "cluster.kubernetes.ttl_seconds"),
    "pull secret": (job(image_pull_secrets=["My Registry"]), "cluster.kubernetes.image_pull_secrets"),
    "annotation": (job(annotations={"a b": "1"}), "cluster.kubernetes.annotations"),
    "annotation of the toolkit": (job(annotations={"toolkit/run": "x"}), "cluster.kubernetes.annotations"),
    "topology": (job(topology="a b"), "cluster.kubernetes.topology"),
    "topology and pod affinity": (
        job(topology="zone", affinity={"podAffinity": {}}),
        "cluster.kubernetes.topology",
    ),
    "affinity": (job(affinity={"nodeAffinty": {}}), "cluster.kubernetes.affinity"),
    "toleration": (job(tolerations=[{"taint": "gpu"}]), "cluster.kubernetes.tolerations"),
    "toleration that is a word": (job(tolerations=["gpu"]), "cluster.kubernetes.tolerations"),
    "two sources of a volume": (
        job(extra_volumes={"/a": {"hostPath": {}, "nfs": {}}}),
        "cluster.kubernetes.extra_volumes",
    ),
    "claim as an extra volume": (
        job(extra_volumes={"/a": {"persistentVolumeClaim": {"claimName": "a"}}}),
        "cluster.kubernetes.extra_volumes",
    ),
    "extra volume over the configuration": (
        job(extra_volumes={"/etc": {"emptyDir": {}}}),
        "cluster.kubernetes.extra_volumes",
    ),
    "two volumes at one place": (
        job(extra_volumes={"/workspace": {"emptyDir": {}}}),
        "cluster.kubernetes.extra_volumes",
    ),
    "run directory on a volume that ends with its pod": (
        job(volumes={}, extra_volumes={"/workspace": {"emptyDir": {}}}),
        "cluster.kubernetes.volumes",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_kubernetes_keys_are_rejected(name: str) -> None:
    wrong, key = REFUSED[name]
    with pytest.raises(ConfigError) as refused:
        kubernetes.render(wrong)
    assert [problem.key for problem in refused.value.problems] == [key]


def test_run_dir_may_be_on_a_network_volume() -> None:
    nfs = {"/workspace": {"nfs": {"server": "10.0.0.2", "path": "/runs"}}}
    _, job_set = documents(job(volumes={}, extra_volumes=nfs))
    assert pod_of(job_set)["volumes"][-1] == {"name": "extra-0", **nfs["/workspace"]}


def test_typed_overrides_reach_the_manifest(tmp_path: Path) -> None:
    """As typed: maps and lists of maps in Hydra's notation."""
    words = [
        "+exp=quickstart",
        "cluster=kubernetes",
        "cluster.kubernetes.image=toolkit",
        "cluster.gpus_per_node=1",
        "cluster.gpu=h100",
        "cluster.kubernetes.volumes={/workspace: training}",
        "cluster.kubernetes.environment={NCCL_DEBUG: INFO, NCCL_SOCKET_IFNAME: eth0}",
        "cluster.kubernetes.tolerations=[{key: dedicated, operator: Exists}]",
        "cluster.kubernetes.affinity={podAntiAffinity: "
        "{preferredDuringSchedulingIgnoredDuringExecution: []}}",
        "cluster.kubernetes.extra_volumes={/scratch: {hostPath: {path: /mnt/nvme}}}",
    ]
    _, job_set = documents(create_job(plan_job(compose(words)), "/repo/launch/train.py", here=tmp_path))
    pod = pod_of(job_set)
    assert {"name": "NCCL_SOCKET_IFNAME", "value": "eth0"} in pod["containers"][0]["env"]
    assert {"key": "dedicated", "operator": "Exists"} in pod["tolerations"]
    assert "podAntiAffinity" in pod["affinity"]
    assert {"name": "extra-0", "hostPath": {"path": "/mnt/nvme"}} in pod["volumes"]


def test_literal_secret_is_not_echoed() -> None:
    with pytest.raises(ConfigError) as refused:
        kubernetes.render(job(secrets={"WANDB_API_KEY": "0123456789abcdef"}))
    assert "WANDB_API_KEY" in str(refused.value)
    assert "0123456789abcdef" not in str(refused.value)


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        kubernetes.render(job(image=None, queue="A", volumes={}))
    assert len(refused.value.problems) == 3


# ---- kubectl


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fake that writes its arguments to ``asked`` and replies with ``answer`` and ``code``."""
    folder = tmp_path / "bin"
    folder.mkdir()
    script = folder / "kubectl"
    script.write_text(
        '#!/bin/bash\ncd "$(dirname "$0")"\nprintf "%s\\n" "$@" > asked\ncat answer 2>/dev/null\n'
        'cat error >&2 2>/dev/null\nexit "$(cat code 2>/dev/null || echo 0)"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder


def test_submit_applies_the_manifest_file(kubectl: Path) -> None:
    of = replace(ALL, run_dir="/data/run dir; touch pwned")
    id = backends.get_backend(ClusterBackend.kubernetes).submit(of)
    assert id == JobId(ClusterBackend.kubernetes, f"research/{kubernetes.object_name(of)}")
    assert (kubectl / "asked").read_text().splitlines() == kubernetes.argv(of)[1:]
    assert kubernetes.argv(of)[-1] == "--filename=/data/run dir; touch pwned/jobs/001/job.yaml"


@pytest.mark.parametrize("name", [*CASES, "odd"])
def test_real_kubectl_parses_the_same_objects(name: str, tmp_path: Path) -> None:
    """kubectl has another YAML parser. "odd": strings that it would read as numbers or booleans if
    unquoted.
    """
    if shutil.which("kubectl") is None:
        pytest.skip("needs kubectl")
    odd = job(
        node_selector={
            "a": "y",
            "b": "1e3",
            "c": "0o17",
            "d": "on",
            "e": "1_000",
            "n": "null",
            "f": "0x1F",
            "g": "2026-11-22",
        }
    )
    of = CASES.get(name, odd)
    text = kubernetes.render(of)[kubernetes.MANIFEST_FILE]
    (tmp_path / "job.yaml").write_text(text)
    done = subprocess.run(
        ["kubectl", "label", "--local", "--output=json", f"--filename={tmp_path / 'job.yaml'}", "read=yes"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    decoder, rest, found = json.JSONDecoder(), done.stdout.strip(), []
    while rest:
        document, end = decoder.raw_decode(rest)
        assert document["metadata"]["labels"].pop("read") == "yes"
        found.append(document)
        rest = rest[end:].lstrip()
    assert tuple(found) == documents(of)


def test_kubectl_error_is_reported(kubectl: Path) -> None:
    (kubectl / "error").write_text('error: resource mapping not found for kind "JobSet"\n')
    (kubectl / "code").write_text("1")
    with pytest.raises(InputError, match='not found for kind "JobSet"'):
        kubernetes.submit(ALL)


def test_missing_kubectl_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match="kubectl is not installed here"):
        kubernetes.submit(ALL)


@pytest.mark.parametrize(
    ("found", "state"),
    [
        (None, JobState.ENDED),
        ({"spec": {}}, JobState.QUEUED),
        (
            {"spec": {"suspend": True}, "status": {"replicatedJobsStatus": [{"name": "node", "ready": 0}]}},
            JobState.QUEUED,
        ),
        (
            {"spec": {}, "status": {"replicatedJobsStatus": [{"name": "node", "active": 1, "ready": 0}]}},
            JobState.QUEUED,
        ),
        (
            {"spec": {}, "status": {"replicatedJobsStatus": [{"name": "node", "active": 1, "ready": 1}]}},
            JobState.RUNNING,
        ),
        (
            {
                "spec": {},
                "status": {
                    "conditions": [{"type": "Suspended", "status": "False"}],
                    "replicatedJobsStatus": [{"name": "node", "active": 1, "ready": 1}],
                },
            },
            JobState.RUNNING,
        ),
        ({"spec": {}, "status": {"conditions": [{"type": "Completed", "status": "True"}]}}, JobState.ENDED),
        ({"spec": {}, "status": {"conditions": [{"type": "Failed", "status": "True"}]}}, JobState.ENDED),
    ],
)
def test_read_state(found: Mapping[str, Any] | None, state: JobState, kubectl: Path) -> None:
    (kubectl / "answer").write_text(json.dumps(found) if found is not None else "")
    assert kubernetes.state(JobId(ClusterBackend.kubernetes, "research/gpt-1")) is state
    assert (kubectl / "asked").read_text().split() == [
        "--namespace=research",
        "get",
        "jobset",
        "gpt-1",
        "--ignore-not-found",
        "--output=json",
    ]


def test_cancel_deletes_job_and_config_map(kubectl: Path) -> None:
    kubernetes.cancel(JobId(ClusterBackend.kubernetes, "research/gpt-1"))
    assert (kubectl / "asked").read_text().split() == [
        "--namespace=research",
        "delete",
        "jobset/gpt-1",
        "configmap/gpt-1",
        "--ignore-not-found",
        "--wait=false",
    ]


if __name__ == "__main__":
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for case, of in CASES.items():
        (GOLDEN / case).write_text(golden(of), encoding="utf-8")
