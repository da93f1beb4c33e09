"""Kubernetes: a RayJob (KubeRay 1.2 or later), which makes a Ray cluster, trains on it, and tries again after a fault."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from oar_plugin.launch import on_head
from oar_plugin.launch.job import Job, LaunchError

_LONGEST_NAME = 47  # of a RayJob: KubeRay makes names of it that Kubernetes limits to 63
_SHARED = "shared"
_MEMORY = "dshm"


@dataclass(frozen=True)
class Pods:
    """What the cluster's pods are.

    Args:
        image: with verl, this plugin, and the recipe.
        namespace: or None for the current one.
        claim: PersistentVolumeClaim that all pods can write, for data and checkpoints.
        mount: where they have it.
        secret: whose keys become environment variables (HF_TOKEN, WANDB_API_KEY); None for no secret.
        cpus: of a pod; None for no request.
        memory: of a pod, as Kubernetes writes it; None for no request.
        retries: how often the job is submitted again after a fault, each time on a new cluster.
    """

    image: str
    claim: str
    namespace: str | None = None
    mount: str = "/shared"
    secret: str | None = None
    cpus: str | None = None
    memory: str | None = None
    retries: int = 3


def manifest(job: Job, pods: Pods) -> dict[str, Any]:
    """The RayJob.

    Raises:
        LaunchError: the job's name is too long, or its checkpoints would be lost with a pod.
    """
    if not f"{job.checkpoints}/".startswith(f"{pods.mount.rstrip('/')}/"):
        raise LaunchError(
            f"trainer.default_local_dir={job.checkpoints}: not on the volume that all pods see; set it to a folder in "
            f"{pods.mount}, with --env OAR_CHECKPOINTS={pods.mount}/checkpoints"
        )
    if len(job.name) > _LONGEST_NAME:
        raise LaunchError(
            f"{job.name}: a RayJob's name has at most {_LONGEST_NAME} letters; give the recipe's folder a shorter one"
        )
    metadata = {"name": job.name, **({"namespace": pods.namespace} if pods.namespace else {})}
    script = "\n".join(
        ["set -eo pipefail", *([job.setup] if job.setup else []), job.wait(), job.train(on_cluster=True)]
    )
    workers = {
        "groupName": "gpu",
        "replicas": job.nodes - 1,
        "minReplicas": job.nodes - 1,
        "maxReplicas": job.nodes - 1,
        "rayStartParams": {"num-gpus": str(job.gpus_per_node)},
        "template": _template(pods, "ray-worker", job.gpus_per_node, job.environment),
    }
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": metadata,
        "spec": {
            # What it does is in a variable of the head: an entry point goes through several shells, each with its own quoting.
            "entrypoint": f"python -m {on_head.__name__}",
            # Each try has a cluster of its own, and resumes from the last checkpoint on the shared volume.
            "backoffLimit": pods.retries,
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": 600,
            "rayClusterSpec": {
                "headGroupSpec": {
                    "rayStartParams": {"dashboard-host": "0.0.0.0", "num-gpus": str(job.gpus_per_node)},
                    "template": _template(
                        pods, "ray-head", job.gpus_per_node, {**job.environment, on_head.VARIABLE: script}
                    ),
                },
                "workerGroupSpecs": [workers] if job.nodes > 1 else [],
            },
        },
    }


def _template(pods: Pods, name: str, gpus: int, environment: Mapping[str, str]) -> dict[str, Any]:
    resources: dict[str, Any] = {"nvidia.com/gpu": gpus}
    if pods.cpus:
        resources["cpu"] = pods.cpus
    if pods.memory:
        resources["memory"] = pods.memory
    container: dict[str, Any] = {
        "name": name,
        "image": pods.image,
        # Kubernetes would replace $(NAME) by a variable.
        "env": [{"name": key, "value": value.replace("$(", "$$(")} for key, value in environment.items()],
        "resources": {"limits": dict(resources), "requests": dict(resources)},
        "volumeMounts": [{"name": _SHARED, "mountPath": pods.mount}, {"name": _MEMORY, "mountPath": "/dev/shm"}],
    }
    if pods.secret:
        container["envFrom"] = [{"secretRef": {"name": pods.secret}}]
    return {
        "spec": {
            "containers": [container],
            "volumes": [
                {"name": _SHARED, "persistentVolumeClaim": {"claimName": pods.claim}},
                # A container has 64 MB otherwise; Ray's object store and NCCL live here.
                {"name": _MEMORY, "emptyDir": {"medium": "Memory"}},
            ],
        }
    }


def text(job: Job, pods: Pods) -> str:
    """The manifest in YAML."""
    import yaml

    return str(yaml.safe_dump(manifest(job, pods), sort_keys=False, width=128))


def submit(yaml_text: str) -> int:
    """Give a manifest to `kubectl`, which refuses one that is already there: applied again, it would not run again.

    Returns:
        the exit status of `kubectl`.

    Raises:
        LaunchError: there is no `kubectl`.
    """
    if shutil.which("kubectl") is None:
        raise LaunchError("--on kubernetes: there is no kubectl here; install it, or use --dry-run to see the manifest")
    return subprocess.run(["kubectl", "create", "-f", "-"], input=yaml_text, text=True, check=False).returncode
