"""An engine, or a cluster of them, served over HTTP to any client of OpenAI's interface.

inbox      one stream's way from an engine's thread into an event loop
scores     log-probabilities, a bias and penalties, around an engine's sampler
apart      steps of an engine that end no request but those that fail
loop       one engine in a thread of its own: submit, cancel, close
requests   what clients may send
chat       from messages to a prompt, by a checkpoint's template
admission  how many prompt tokens may wait, by the rate that is measured
metrics    what the server has done, under vLLM's names
watch      pictures of an engine for the page that draws them, in `page/`
app        the application: OpenAI's endpoints, health and metrics
server     the application behind an address

All but the first four need `pip install "minikv[serve]"`. Busy and RequestFailed are what a server
may answer instead of tokens. A cluster's front raises them, too.
"""

from minikv.serving.apart import Steps
from minikv.serving.inbox import Busy, Inbox, RequestFailed
from minikv.serving.loop import EngineLoop, Health
from minikv.serving.scores import Asked, Scored, Scoring

__all__ = [
    "Asked", "Busy", "EngineLoop", "Health", "Inbox", "RequestFailed", "Scored", "Scoring", "Steps",
]  # fmt: skip
