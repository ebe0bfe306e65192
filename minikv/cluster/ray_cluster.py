"""A connection to a Ray cluster that runs already, or to a new cluster of this machine alone."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import minikv

# Bytes. What finds no room goes to the disk. Ray would take a third of the memory.
OBJECT_STORE = 2**28
TRIES = 3  # to start: Ray gives a node 30 seconds, which it may need on a busy machine


def import_ray(alone: bool = False) -> Any:
    """The module `ray`. Raises ImportError, with the way out, if it is not installed. alone: for a
    cluster of this machine only, which listens at 127.0.0.1, under a token of its own. A cluster
    that runs already has its own token: set Ray's RAY_AUTH_TOKEN to it."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # send no usage statistics
    # A worker has a minute to start, if nobody says otherwise.
    os.environ.setdefault("RAY_worker_register_timeout_seconds", "600")
    if alone:  # read when Ray is imported; on systems other than Linux 0 is Ray's default
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        # Each call between Ray's processes has to show this token, so no other user of this machine
        # can run code here. Without it, Ray would make one up and keep it in the home folder.
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    try:
        import ray
    except ImportError:
        raise ImportError(
            'a cluster needs Ray, which is not installed: pip install "minikv[distributed]"'
        ) from None
    return ray


@contextmanager
def connected(ray: Any, address: str | None, num_cpus: int | None) -> Iterator[None]:
    """Connect to the cluster at `address`; if that is None, to a new cluster of this machine, with
    `num_cpus` cores, which ends with the `with` block. Raises RuntimeError if a new
    cluster does not start, which happens on a busy machine."""
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    with _short_start() if address is None else nullcontext():
        try:
            if address is not None:
                ray.init(address, **options)
            else:
                _start(ray, num_cpus=num_cpus, **options)
            yield
        finally:
            ray.shutdown()


def _start(ray: Any, **options: Any) -> None:
    for tries_left in reversed(range(TRIES)):
        try:
            ray.init(
                "local", num_gpus=0, include_dashboard=False, object_store_memory=OBJECT_STORE,
                _node_ip_address="127.0.0.1", **options,
            )  # fmt: skip
            return
        except Exception as error:  # Ray raises many kinds; for a node that is late, just this
            ray.shutdown()
            if not tries_left:
                raise RuntimeError(f"Ray does not start: {error}") from error


@contextmanager
def _short_start() -> Iterator[None]:
    """Let Ray's processes find this minikv, and start faster.

    Each of the eight imports jsonschema. If JupyterLab is installed, that builds a grammar for
    addresses, which takes two seconds of processor time and is not needed here. On a busy machine
    with two cores Ray then gives up before its processes have started.
    """
    before = os.environ.get("PYTHONPATH")
    with TemporaryDirectory() as folder:
        Path(folder, "rfc3987_syntax.py").write_text("raise ImportError\n")
        paths = [folder, str(Path(minikv.__file__).parents[1]), *([before] if before else [])]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
        try:
            yield
        finally:
            if before is None:
                del os.environ["PYTHONPATH"]
            else:
                os.environ["PYTHONPATH"] = before
