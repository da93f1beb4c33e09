"""The RayJob."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import yaml

from oar_plugin.launch import kubernetes
from oar_plugin.launch.job import LaunchError
from tests.launch.conftest import STRANGE

PODS = kubernetes.Pods(
    image="registry/verl-oar:1", claim="disk", secret="keys", cpus="64", memory="900Gi", namespace="ml"
)


def containers(cluster):
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [group["template"]["spec"]["containers"][0] for group in groups]


def test_it_has_the_recipes_nodes_gpus_volume_and_shared_memory(job):
    made = yaml.safe_load(kubernetes.text(job, PODS))
    assert (made["apiVersion"], made["kind"]) == ("ray.io/v1", "RayJob")
    assert made["metadata"] == {"name": "seven-oar", "namespace": "ml"}
    cluster = made["spec"]["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    assert [workers[key] for key in ("replicas", "minReplicas", "maxReplicas")] == [2, 2, 2]  # and the head makes three
    for group in (cluster["headGroupSpec"], workers):
        assert group["rayStartParams"]["num-gpus"] == "8"  # KubeRay takes strings only
        volumes = {volume["name"]: volume for volume in group["template"]["spec"]["volumes"]}
        assert volumes["shared"]["persistentVolumeClaim"] == {"claimName": "disk"}
        assert volumes["dshm"]["emptyDir"] == {"medium": "Memory"}
    for container in containers(cluster):
        wanted = {"nvidia.com/gpu": 8, "cpu": "64", "memory": "900Gi"}
        assert container["resources"] == {"limits": wanted, "requests": wanted}
        assert container["envFrom"] == [{"secretRef": {"name": "keys"}}]
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounts == {"shared": "/shared", "dshm": "/dev/shm"}
        assert {"name": "OAR_DATA", "value": "/shared/my data"} in container["env"]


def test_a_fault_leads_to_another_try_on_a_new_cluster(job):
    spec = kubernetes.manifest(job, replace(PODS, retries=5))["spec"]
    assert spec["backoffLimit"] == 5
    assert spec["shutdownAfterJobFinishes"] is True


def test_one_node_is_the_head_alone(job):
    assert kubernetes.manifest(replace(job, nodes=1), PODS)["spec"]["rayClusterSpec"]["workerGroupSpecs"] == []


def test_the_head_runs_what_the_recipe_says_however_it_is_written(job, fake, tmp_path):
    strange = replace(job, setup="", overrides=(STRANGE, "a='$(OAR_DATA)'"))
    made = yaml.safe_load(kubernetes.text(strange, PODS))
    variables = {entry["name"]: entry["value"] for entry in containers(made["spec"]["rayClusterSpec"])[0]["env"]}
    assert "$$(OAR_DATA)" in variables["OAR_LAUNCH_SCRIPT"]  # Kubernetes makes $( of it
    fake("python", f'printf "%s\\n" "$@" >> "{tmp_path}/done"')
    entry = [sys.executable, *made["spec"]["entrypoint"].split()[1:]]
    environment = {**os.environ, **{name: value.replace("$$(", "$(") for name, value in variables.items()}}
    subprocess.run(entry, env=environment, check=True, timeout=60)
    words = (tmp_path / "done").read_text().splitlines()
    assert words.index("oar_plugin.launch.wait") < words.index("verl.trainer.main_ppo")
    assert STRANGE in words
    assert "a='$(OAR_DATA)'" in words
    assert set(made["spec"]["entrypoint"]) <= set("abcdefghijklmnopqrstuvwxyz_.- ")  # nothing for a shell to read


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"checkpoints": "/sharedx/c"}, "not on the volume that all pods see"),
        ({"checkpoints": "checkpoints/c"}, "not on the volume"),
        ({"variant": "x" * 60}, "at most 47 letters"),
    ],
)
def test_what_cannot_work_is_refused(job, change, message):
    with pytest.raises(LaunchError, match=message):
        kubernetes.manifest(replace(job, **change), PODS)


def test_it_is_given_to_kubectl(job, fake, tmp_path, monkeypatch):
    fake("kubectl", f'printf "%s\\n" "$*" > {tmp_path}/called; cat > {tmp_path}/manifest')
    text = kubernetes.text(job, PODS)
    assert kubernetes.submit(text) == 0
    assert (tmp_path / "called").read_text() == "create -f -\n"
    assert (tmp_path / "manifest").read_text() == text
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="there is no kubectl here"):
        kubernetes.submit(text)
