"""The machines of a Ray cluster as the workers of `grade`.

Ray runs one job after another in a process that it keeps, and gives the job of a machine that was
lost to another one. So each of its processes has a starter of its own (`process`), which stays
warm.
"""

import hashlib
import os
import platform
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import minikv

LOCAL = "local"  # the address that asks for a cluster of this machine alone
LOCAL_STORE = 128 << 20  # bytes for the class's files; Ray would take a third of the memory


@contextmanager
def workers(address: str, jobs: int | None) -> Iterator[Executor]:
    """The cluster at `address`, "auto" for the one that runs on this machine; for "local" one of
    `jobs` workers, which ends with the block.

    Raises ConnectionError if there is no such cluster, BrokenExecutor for whatever it fails at.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is reported to anybody
    if address == LOCAL:  # on other systems than Linux it is Ray's default
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    try:
        import ray
    except ImportError:
        raise ConnectionError("--ray needs Ray: pip install 'minikv[distributed]'") from None
    try:
        try:
            _connect(ray, address, jobs)
        except Exception as error:  # Ray raises many kinds, its own and others
            raise ConnectionError(f"--ray {address}: {_last_line(error)}") from None
        yield _Cluster(ray)
    except ray.exceptions.RayError as error:
        raise BrokenExecutor(_last_line(error)) from None
    finally:
        ray.shutdown()


def _connect(ray: Any, address: str, jobs: int | None) -> None:
    limits = {name: text for name, text in os.environ.items() if name.startswith("MINIKV_")}
    options = {
        "logging_level": "ERROR",
        "log_to_driver": False,
        "runtime_env": {"env_vars": limits},
    }
    if address != LOCAL:
        ray.init(address, **options)
        return
    root, before = str(Path(minikv.__file__).parents[1]), os.environ.get("PYTHONPATH", "")
    with TemporaryDirectory() as folder:
        # Ray's processes import jsonschema. Beside JupyterLab that builds a grammar for addresses:
        # two seconds of processor time in each. On a busy machine Ray then gives up on them.
        Path(folder, "rfc3987_syntax.py").write_text("raise ImportError\n")
        os.environ["PYTHONPATH"] = os.pathsep.join([folder, root, before])
        try:
            ray.init(
                LOCAL, num_cpus=jobs, num_gpus=0, object_store_memory=LOCAL_STORE,
                include_dashboard=False, _node_ip_address="127.0.0.1", **options,
            )  # fmt: skip
        finally:
            os.environ["PYTHONPATH"] = before


def _last_line(error: Exception) -> str:
    return [type(error).__name__, *str(error).strip().splitlines()][-1]


class _Cluster(Executor):
    def __init__(self, ray: Any):
        self._do = ray.remote(num_cpus=1, max_retries=3)(_do)
        self._put = cache(ray.put)  # a file is sent once, for all its exercises

    def submit(self, function: Callable, /, *arguments: Any, **named: Any) -> Future:
        sent = [self._put(one) if isinstance(one, bytes) else one for one in arguments]
        return self._do.remote(_course(), function, *sent, **named).future()


def _do(course: str, function: Callable, *arguments: Any, **named: Any) -> Any:
    if _course() != course:
        raise RuntimeError(f"{platform.node()} has another version of minikv than this machine")
    return function(*arguments, **named)


@cache
def _course() -> str:
    """Names the files that a mark may depend on."""
    files = sorted(Path(minikv.__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
