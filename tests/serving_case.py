"""What the tests of the server share: one engine behind an address."""

import threading
from contextlib import contextmanager
from types import SimpleNamespace

import httpx
from helpers import InterruptedAttention

from minikv import Engine, EngineConfig
from minikv.serving import EngineLoop
from minikv.serving.app import make_app
from minikv.serving.chat import ChatTemplate
from minikv.serving.server import served

CONFIG = EngineConfig(num_blocks=256, max_num_seqs=16, attention="torch")
KEY = "a key"


class Gate(InterruptedAttention):
    """Steps wait while it is closed."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.open = threading.Event()
        self.open.set()

    def bind(self, batch):
        assert self.open.wait(20)
        return super().bind(batch)


def gated(lm, config=CONFIG):
    """An engine, and the gate before its steps."""
    engine = Engine(lm, config, attention=Gate)
    engine.attention.engine = engine
    return engine, engine.attention.open


@contextmanager
def server(lm, keys=(KEY,), engine=None, **options):
    """`at.url`, `at.address`, `at.engine`, `at.loop`, and `at.ask`: one request by httpx."""
    engine = engine or Engine(lm, CONFIG)
    with EngineLoop(engine) as loop:
        app = make_app(loop, "tinypy", keys, ChatTemplate("tinypy"), **options)
        with served(app) as address, httpx.Client(timeout=30) as client:
            url = "http://{}:{}".format(*address)

            def ask(path="/v1/completions", body=None, key=KEY, method=None, **more):
                method = method or ("GET" if body is None else "POST")
                headers = {"Authorization": f"Bearer {key}"} if key else {}
                return client.request(method, url + path, json=body, headers=headers, **more)

            yield SimpleNamespace(url=url, address=address, engine=engine, loop=loop, ask=ask)
