"""What the tests of the server share: an engine, or workers in this process, behind an address."""

import threading
from contextlib import closing, contextmanager
from types import SimpleNamespace

import httpx
from cluster_case import Fragile
from helpers import InterruptedAttention
from prometheus_client.parser import text_string_to_metric_families
from waiting import PATIENCE

from minikv import Engine, EngineConfig
from minikv.cluster.front import Front
from minikv.cluster.routing import ByPrefix
from minikv.serving import EngineLoop
from minikv.serving.app import make_app
from minikv.serving.chat import ChatTemplate
from minikv.serving.server import served

CONFIG = EngineConfig(num_blocks=256, max_num_seqs=16, attention="torch")
KEY = "a key"
LIMITS = httpx.Limits(keepalive_expiry=2)  # the server closes after 5 s, as httpx would


class Gate(InterruptedAttention):
    """Steps wait while it is closed."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.open = threading.Event()
        self.open.set()

    def bind(self, batch):
        assert self.open.wait(PATIENCE)
        return super().bind(batch)


class OneEngine:
    """An engine in a thread. It steps while `open` is set."""

    def __init__(self, lm, engine=None, life=None):
        self.engine, self.open = engine or Engine(lm, CONFIG, attention=Gate), None
        if engine is None:
            self.engine.attention.engine, self.open = self.engine, self.engine.attention.open
        self.target = EngineLoop(self.engine, life)

    def is_stepping(self):
        return self.target._busy_since is not None

    def has_dropped(self):
        """Everything, or it will before its next step."""
        return not self.target._answers or not self.target._calls.empty()

    def is_idle(self):
        return not self.target._answers and self.target._calls.empty()


class Cluster:
    """A front over workers in this process. The first one's turns begin while `open` is set."""

    def __init__(self, lm, workers=None, **options):
        self.workers = workers or [Fragile(lm, CONFIG)]
        self.target = Front(self.workers, ByPrefix, **options)
        self.open = getattr(self.workers[0], "paused", None)  # those of Ray have none

    @property
    def engine(self):
        return self.workers[0].worker.engine

    def is_stepping(self):
        return self.target.lanes[0].busy_since is not None

    def has_dropped(self):
        return self.target.num_requests == 0

    def is_idle(self):
        waits = any(lane.cancelled for lane in self.target.lanes)
        return self.has_dropped() and not waits and not any(one.worker.jobs for one in self.workers)


@contextmanager
def server(lm, keys=(KEY,), served_by=None, model="tinypy", connections=None, **options):
    """`at.url`, `at.address`, `at.ask`: one request by httpx; `at.by`: what is served, an engine if
    nothing is given. model: whose chat template. connections: what `served` is told about them."""
    by = served_by or OneEngine(lm)
    with by.target as target, closing(ChatTemplate(model)) as template:
        # However slow this machine is, nobody is refused for that.
        app = make_app(target, "tinypy", keys, template, **{"first_token": PATIENCE} | options)
        # It takes 30 ms to read the certificates of the web, and nobody there is asked.
        client = httpx.Client(timeout=PATIENCE, verify=False, limits=LIMITS)
        with served(app, **connections or {}) as address, client:
            url = "http://{}:{}".format(*address)

            def ask(path="/v1/completions", body=None, key=KEY, method=None, headers=(), **more):
                method = method or ("GET" if body is None else "POST")
                headers = ({"Authorization": f"Bearer {key}"} if key else {}) | dict(headers)
                return client.request(method, url + path, json=body, headers=headers, **more)

            yield SimpleNamespace(url=url, address=address, by=by, ask=ask)


async def whole(inbox, num_samples=1):
    """(token ids, text, finish reason) of each sample."""
    ids, texts, reasons = [[[] for _ in range(num_samples)] for _ in range(3)]
    while not all(reasons):
        for index, delta in await inbox.take():
            ids[index] += delta.token_ids
            texts[index].append(delta.text)
            if delta.finish_reason is not None:
                reasons[index].append(delta.finish_reason)
    assert all(len(one) == 1 for one in reasons)
    return [(ids[i], "".join(texts[i]), reasons[i][0]) for i in range(num_samples)]


def metrics_of(at):
    return samples(at.ask("/metrics").text)


def samples(text):
    """{name with its labels, but for the model and the engine: value}."""
    found = {}
    for family in text_string_to_metric_families(text):
        for one in family.samples:
            labels = {k: v for k, v in one.labels.items() if k not in ("model_name", "engine")}
            found[one.name, *labels.values()] = one.value
    return found
