"""Workers as Ray actors: on one machine, or on those of a Ray cluster.

    with ray_workers(4, "tinypy", EngineConfig()) as workers, Front(workers, ByPrefix) as front:
        …

Ray places the processes, notices when one has died, and starts it again, if necessary on another
machine. The front takes care of what a dead worker was doing.

Why actors, and not a deployment of Ray Serve: Serve brings a router, an HTTP server and replicas of
its own, and chooses the replica itself. Here routing is what the course shows, and a worker has
only two calls to answer.
"""

from collections.abc import Callable, Iterator, Sequence as Seq
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import torch

from minikv.cluster.front import WorkerLost
from minikv.cluster.ray_cluster import connected, import_ray
from minikv.cluster.worker import EngineWorker, Hello, WorkDone, WorkerJob
from minikv.config import EngineConfig
from minikv.errors import require_int

FETCHING = 5  # seconds that K and V may take to come from another worker
STARTING = 300  # seconds until a worker must be ready, with its model loaded and compiled


class Actor(EngineWorker):
    """An `EngineWorker` that hands K and V over as objects of Ray: the next worker reads them out
    of this machine's shared memory, or has Ray bring them from another machine."""

    def share(self, thing: Any) -> Any:
        return import_ray().put(thing)

    def fetch(self, shared: Any) -> Any:
        ray = import_ray()
        try:
            return ray.get(shared, timeout=FETCHING)
        except (ray.exceptions.RayError, TimeoutError):  # such as: its worker has died
            return None


class RayWorker:
    """A `minikv.cluster.front.Worker` in an actor of its own, made when it is first started.
    patience: seconds that a call of `work` may take."""

    def __init__(self, make: Callable[[], Any], patience: float):
        self.ray, self.make, self.patience = import_ray(), make, patience

    @cached_property
    def actor(self) -> Any:
        return self.make()

    def end(self) -> None:
        actor = vars(self).pop("actor", None)
        if actor is not None:
            self.ray.kill(actor)

    def start(self) -> Hello:
        try:
            while True:
                try:
                    return self.ray.get(self.actor.start.remote(), timeout=STARTING)
                except self.ray.exceptions.ActorUnavailableError:
                    pass  # it is being started again; the next call waits for that
        except (self.ray.exceptions.RayError, TimeoutError) as error:
            raise WorkerLost(str(error)) from error

    def work(self, jobs: Seq[WorkerJob], cancelled: Seq[int]) -> WorkDone:
        try:
            return self.ray.get(self.actor.work.remote(jobs, cancelled), timeout=self.patience)
        except self.ray.exceptions.RayActorError as error:
            raise WorkerLost(str(error)) from error
        except (self.ray.exceptions.RayError, TimeoutError) as error:
            self.ray.kill(self.actor, no_restart=False)  # it failed or hangs: Ray starts it again
            raise WorkerLost(str(error)) from error


@contextmanager
def ray_workers(
    number: int,
    model: str,
    config: EngineConfig,
    *,
    address: str | None = None,
    patience: float = 60.0,
    work_seconds: float = 0.02,
    dtype: torch.dtype = torch.float32,
) -> Iterator[list[RayWorker]]:
    """`number` engines, each in a process with one core; they end with the `with` block. A process
    begins when its worker is started.

    address: of a running Ray cluster, "auto" for this machine's; minikv and the model must be on
    each of its machines. Default: a new Ray on 127.0.0.1, which ends with the `with` block. Raises
    RuntimeError if there are too few cores for the workers.
    """
    require_int("number", number, 1)
    ray = import_ray(alone=address is None)
    with connected(ray, address, number):
        room = ray.cluster_resources().get("CPU", 0)
        if room < number:
            raise RuntimeError(f"workers: the cluster has {room:.0f} cores for {number} workers")
        make = ray.remote(num_cpus=1, max_restarts=-1)(Actor)
        workers = [
            RayWorker(partial(make.remote, model, config, work_seconds, dtype), patience)
            for _ in range(number)
        ]
        try:
            yield workers
        finally:
            for worker in workers:
                worker.end()
