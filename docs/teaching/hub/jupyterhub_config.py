"""JupyterHub for a class: one server per student, with storage of its own.

    docker build --tag minikv .            # in the repository
    pip install -r requirements.txt        # in this folder, for the hub
    npm install --global configurable-http-proxy
    jupyterhub                             # in this folder

With MINIKV_HUB=local the servers are processes of this machine, without containers and without
passwords: to try the hub, never for a class.
"""

import os
import sys
from pathlib import Path

c = get_config()  # noqa: F821  JupyterHub defines it
LOCAL = os.environ.get("MINIKV_HUB") == "local"
HERE = Path(os.environ.get("MINIKV_HUB_DATA", Path.cwd()))

# ── Who may log in ────────────────────────────────────────────────────────────
# A class has an authenticator of its institution: LTI, OAuth or LDAP.
c.JupyterHub.authenticator_class = "dummy" if LOCAL else "pam"
c.Authenticator.allow_all = True
c.Authenticator.admin_users = set() if LOCAL else {"lecturer"}

# ── What a student gets ───────────────────────────────────────────────────────
# `minikv start` fills an empty home, and never touches what a student has written.
c.Spawner.cmd = [
    "sh", "-c", 'minikv start --no-lab "$HOME/course" && exec jupyterhub-singleuser "$@"', "server",
]  # fmt: skip
c.Spawner.notebook_dir = "~/course"
c.Spawner.default_url = "/lab/tree/notebooks/00_start_here.ipynb"
c.Spawner.http_timeout = c.Spawner.start_timeout = 120
# Small tensors: threads would only wait for each other, and take the neighbours' cores.
c.Spawner.environment = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
# ../CLASS.md says what a notebook takes. Containers are held to these; local processes are not.
c.Spawner.mem_limit = "3G"
c.Spawner.cpu_limit = 2

if LOCAL:
    c.JupyterHub.spawner_class = "simple"
    c.SimpleLocalProcessSpawner.home_dir_template = str(HERE / "homes" / "{username}")
    c.Spawner.args = ["--allow-root"] if os.getuid() == 0 else []
    # Where JupyterLab lies, if it is not in the hub's own environment.
    for name in ("JUPYTER_CONFIG_PATH", "JUPYTERLAB_DIR", "JUPYTER_PATH"):
        if name in os.environ:
            c.Spawner.environment[name] = os.environ[name]
else:
    c.JupyterHub.spawner_class = "docker"
    c.DockerSpawner.image = "minikv"  # better: by its digest, the same for the whole term
    c.DockerSpawner.volumes = {"minikv-{username}": "/home/reader"}
    c.DockerSpawner.remove = True  # the container; the volume stays
    c.DockerSpawner.pids_limit = 512
    c.JupyterHub.hub_connect_ip = "host.docker.internal"
    c.DockerSpawner.extra_host_config = {"extra_hosts": {"host.docker.internal": "host-gateway"}}
    c.JupyterHub.hub_ip = "0.0.0.0"  # containers reach the hub; keep port 8081 behind a firewall

# ── The hub itself ────────────────────────────────────────────────────────────
c.JupyterHub.bind_url = os.environ.get("MINIKV_HUB_URL", "http://127.0.0.1:8000")
c.JupyterHub.db_url = f"sqlite:///{HERE / 'jupyterhub.sqlite'}"
c.JupyterHub.cookie_secret_file = str(HERE / "jupyterhub_cookie_secret")
c.ConfigurableHTTPProxy.pid_file = str(HERE / "jupyterhub-proxy.pid")
c.JupyterHub.concurrent_spawn_limit = 20  # a class that comes in at ten past
# Memory of the machine, divided by what a student takes.
c.JupyterHub.active_server_limit = int(os.environ.get("MINIKV_HUB_SERVERS", 100))

# A server that nobody uses is stopped; its files stay. A kernel that computes counts as use.
c.JupyterHub.services = [
    {
        "name": "idle-culler",
        "command": [
            sys.executable, "-m", "jupyterhub_idle_culler", "--timeout=3600", "--cull-every=300",
        ],
    }
]  # fmt: skip
c.JupyterHub.load_roles = [
    {
        "name": "idle-culler",
        "services": ["idle-culler"],
        "scopes": ["list:users", "read:users:activity", "read:servers", "delete:servers"],
    }
]
if LOCAL and "MINIKV_HUB_TOKEN" in os.environ:  # for the test
    c.JupyterHub.services.append({"name": "test", "api_token": os.environ["MINIKV_HUB_TOKEN"]})
    scopes = ["admin:users", "admin:servers", "access:servers", "tokens"]
    c.JupyterHub.load_roles.append({"name": "test", "services": ["test"], "scopes": scopes})
