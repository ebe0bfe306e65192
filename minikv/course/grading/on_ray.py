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
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import minikv
from minikv.cluster.ray_cluster import connected, import_ray

LOCAL = "local"  # the address that asks for a cluster of this machine alone


@contextmanager
def workers(address: str, jobs: int | None) -> Iterator[Executor]:
    """The cluster at `address`, "auto" for the one that runs on this machine; for "local" one of
    `jobs` workers, which ends with the block.

    Raises ConnectionError if there is no such cluster, BrokenExecutor for whatever it fails at.
    """
    here = address == LOCAL
    try:
        ray = import_ray(alone=here)
    except ImportError as error:
        raise ConnectionError(f"--ray: {error}") from None
    limits = {name: text for name, text in os.environ.items() if name.startswith("MINIKV_")}
    with ExitStack() as stack:
        try:
            to = None if here else address
            connection = connected(ray, to, jobs, runtime_env={"env_vars": limits})
            stack.enter_context(connection)
        except Exception as error:  # Ray raises many kinds, its own and others
            raise ConnectionError(f"--ray {address}: {_last_line(error)}") from None
        try:
            yield _Cluster(ray)
        except ray.exceptions.RayError as error:
            raise BrokenExecutor(_last_line(error)) from None


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
    package = Path(minikv.__file__).parent
    files = sorted([*package.rglob("*.py"), *package.rglob("*.toml")])
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
