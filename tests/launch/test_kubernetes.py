"""The RayJob."""

import os
import subprocess

import yaml

from tests.launch.conftest import STRANGE

PODS = {
    "image": "registry/verl-oar:1",
    "claim": "disk",
    "mount": "/shared",
    "secret": "keys",
    "cpus": "64",
    "memory": "900Gi",
}


def test_it_has_the_recipes_nodes_gpus_volume_and_shared_memory(script):
    made = yaml.safe_load(script("kubernetes.j2", **PODS))
    assert (made["apiVersion"], made["kind"], made["metadata"]) == ("ray.io/v1", "RayJob", {"name": "seven-oar"})
    assert made["spec"]["backoffLimit"] == 3  # each try has a cluster of its own
    assert made["spec"]["shutdownAfterJobFinishes"] is True
    cluster = made["spec"]["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    assert [workers[key] for key in ("replicas", "minReplicas", "maxReplicas")] == [2, 2, 2]  # and the head makes three
    for group in (cluster["headGroupSpec"], workers):
        assert group["rayStartParams"]["num-gpus"] == "8"  # KubeRay takes strings only
        pod = group["template"]["spec"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert volumes["shared"]["persistentVolumeClaim"] == {"claimName": "disk"}
        assert volumes["dshm"]["emptyDir"] == {"medium": "Memory"}
        (container,) = pod["containers"]
        wanted = {"nvidia.com/gpu": 8, "cpu": "64", "memory": "900Gi"}
        assert container["resources"] == {"limits": wanted, "requests": wanted}
        assert container["envFrom"] == [{"secretRef": {"name": "keys"}}]
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounts == {"shared": "/shared", "dshm": "/dev/shm"}
        assert {"name": "OAR_DATA", "value": "/shared/my data"} in container["env"]


def test_names_and_values_of_variables_are_strings_as_they_are(script):
    strange = {"NO": "1", "ON": "yes", "DOLLARS": "$$(A) $(B) $C $"}
    cluster = yaml.safe_load(script("kubernetes.j2", **PODS, environment=strange))["spec"]["rayClusterSpec"]
    (container,) = cluster["workerGroupSpecs"][0]["template"]["spec"]["containers"]
    # Kubernetes makes one dollar of two, and a variable of $( ... ) behind a single one.
    assert {entry["name"]: entry["value"].replace("$$", "$") for entry in container["env"]} == strange
    assert all("$" not in entry["value"].replace("$$", "") for entry in container["env"])


def test_one_node_is_the_head_alone_and_nothing_is_asked_that_was_not_said(script):
    pods = {**PODS, "secret": "", "cpus": "", "memory": ""}
    cluster = yaml.safe_load(script("kubernetes.j2", **pods, nodes=1))["spec"]["rayClusterSpec"]
    assert "workerGroupSpecs" not in cluster
    (container,) = cluster["headGroupSpec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert "envFrom" not in container


def test_the_head_runs_what_the_recipe_says_however_it_is_written(script, fake, tmp_path):
    made = yaml.safe_load(script("kubernetes.j2", **PODS, setup="export SET=up; : $$"))
    (container,) = made["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"]
    variables = {entry["name"]: entry["value"] for entry in container["env"]}
    assert "$$(OAR_DATA)" in variables["OAR_LAUNCH_SCRIPT"]  # Kubernetes makes $( of it
    assert set(made["spec"]["entrypoint"]) <= set(
        "abcdefghijklmnopqrstuvwxyzOARLUNCHSIPT_.- 0123456789"
    )  # no shell reads it
    words = made["spec"]["entrypoint"].split()
    assert words[:3] == ["python", "-m", "oar_plugin.launch.wait"]
    assert words[-2:] == ["--then", "OAR_LAUNCH_SCRIPT"]
    fake("python", f'printf "%s\\n" "$SET" "$@" >> "{tmp_path}/done"')
    environment = {**os.environ, **{name: value.replace("$$", "$") for name, value in variables.items()}}
    subprocess.run(["bash", "-c", environment["OAR_LAUNCH_SCRIPT"]], env=environment, check=True, timeout=60)
    assert {"up", "verl.trainer.main_ppo", STRANGE} <= set((tmp_path / "done").read_text().splitlines())
