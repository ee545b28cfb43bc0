"""JupyterHub: every notebook reports. Append the part of your spawner to jupyterhub_config.py.

A notebook's workload is `notebook-USER`, unless its code names another one before it uses the GPU.
"""

c = get_config()  # noqa: F821 - JupyterHub defines it

VARIABLES = {
    # In front of the image's own entries, if it has some.
    "PYTHONPATH": "/run/gpumem/client",
    "GPUMEM_DEFAULT_WORKLOAD": lambda spawner: f"notebook-{spawner.user.name}",
}

# KubeSpawner. The node's folder may not exist yet. Pod Security Standards other than privileged reject hostPath.
c.KubeSpawner.environment.update(VARIABLES)
c.KubeSpawner.volumes.append(
    {"name": "gpumem", "hostPath": {"path": "/run/gpumem", "type": "DirectoryOrCreate"}},
)
c.KubeSpawner.volume_mounts.append({"name": "gpumem", "mountPath": "/run/gpumem", "readOnly": True})

# SystemdSpawner. A notebook sees /run/gpumem of the node without a mount.
c.SystemdSpawner.environment.update(VARIABLES)
