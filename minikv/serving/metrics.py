"""What a server has done, for Prometheus, under the names that vLLM uses, so that a dashboard made
for vLLM shows minikv.

Buckets are vLLM's with some shorter ones, because a small model is faster. What an engine counts
itself is read from its `Stats` when somebody asks: a request that comes back after a preemption is
no prefix hit there.
"""

from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from minikv.outputs import Stats
from minikv.serving.gaps import Gaps
from minikv.serving.loop import Health

FIRST = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20,
    40, 80, 160, 640, 2560,
)  # fmt: skip
BETWEEN = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5,
    7.5, 10, 20, 40, 80,
)  # fmt: skip
WHOLE = (
    0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480,
    960, 1920, 7680,
)  # fmt: skip
TOKENS = tuple(base * 10**power for power in range(5) for base in (1, 2, 5))

# name: (help, what of an engine's Stats)
GAUGES: dict[str, tuple[str, Callable[[Stats], float]]] = {
    "num_requests_running": ("Sequences that run", lambda stats: stats.running),
    "num_requests_waiting": ("Sequences that wait", lambda stats: stats.waiting),
    "kv_cache_usage_perc": (
        "Share of the blocks that running sequences hold, 0 to 1",
        lambda stats: (stats.blocks_used - stats.blocks_cached) / stats.blocks_total,
    ),
}
COUNTERS: dict[str, tuple[str, Callable[[Stats], float]]] = {
    "prefix_cache_queries": ("Tokens looked up", lambda stats: stats.looked_up_tokens),
    "prefix_cache_hits": ("Of those, tokens found", lambda stats: stats.hit_tokens),
    "num_preemptions": ("Preemptions", lambda stats: stats.preemptions),
}
SPECULATION = {  # name: (help, what of a `Speculation`)
    "spec_decode_num_drafts": ("Times that drafts were verified", "verified"),
    "spec_decode_num_draft_tokens": ("Drafted tokens", "drafts"),
    "spec_decode_num_accepted_tokens": ("Of those, accepted", "accepted"),
}
STATES = {  # name: (help, what of the `Counts` of a model with layers that keep a state)
    "state_copies_used": ("Sequences that began with the copy of a state", "used"),
    "state_copies_made": ("Copies of states that were made", "made"),
    "state_recomputed_tokens": (
        "Tokens cached, but with no state behind them",
        "recomputed_tokens",
    ),
}


class Metrics(Collector):
    """Counts what the server hears of each request. `health` gives the engines' own figures."""

    def __init__(self, health: Callable[[], Sequence[Health]], model: str):
        self.registry, self._health, self._model = CollectorRegistry(), health, model
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens")
        self.by_source = self._counter("prompt_tokens_by_source", "Prompt tokens", "source")
        self.generation_tokens = self._counter("generation_tokens", "New tokens")
        self.success = self._counter("request_success", "Requests that are over", "finished_reason")
        self.rejections = self._counter("admission_rejections", "Requests refused", "reason")
        self.first_token = self._histogram("time_to_first_token_seconds", FIRST)
        self.between = Gaps(BETWEEN)
        self.per_token = self._histogram("request_time_per_output_token_seconds", BETWEEN)
        self.whole = self._histogram("e2e_request_latency_seconds", WHOLE)
        self.decode = self._histogram("request_decode_time_seconds", WHOLE)
        self.prompt_lengths = self._histogram("request_prompt_tokens", TOKENS)
        self.lengths = self._histogram("request_generation_tokens", TOKENS)
        self.max_tokens = self._histogram("request_params_max_tokens", TOKENS)
        self.samples = self._histogram("request_params_n", (1, 2, 5, 10, 20))
        self.registry.register(self)

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def begun(self, waited: float, num_prompt: int, num_cached: int) -> None:
        """A request has its first token, `waited` seconds after it came."""
        self.first_token.observe(waited)
        self.prompt_tokens.inc(num_prompt)
        self.prompt_lengths.observe(num_prompt)
        for source, number in (
            ("local_compute", num_prompt - num_cached), ("local_cache_hit", num_cached),
        ):  # fmt: skip
            self.by_source.labels(self._model, "0", source).inc(number)

    def grown(self, num_tokens: int, seconds: float, has_first: bool) -> None:
        """A sample has got tokens, `seconds` after the ones before, or after its first: each took
        its share of it."""
        self.generation_tokens.inc(num_tokens)
        gaps = num_tokens - has_first
        if gaps:
            self.between.observe(seconds / gaps, gaps)

    def ended(self, reason: str, num_tokens: int, decode_seconds: float, seconds: float) -> None:
        """A sample is over, `seconds` after its request came and `decode_seconds` after the first
        token."""
        self.success.labels(self._model, "0", reason).inc()
        self.lengths.observe(num_tokens)
        self.whole.observe(seconds)
        self.decode.observe(decode_seconds)
        if num_tokens > 1:
            self.per_token.observe(decode_seconds / (num_tokens - 1))

    def collect(self) -> Iterator[Metric]:
        """The gaps between tokens, and the engines' own figures, now."""
        labels, engines = ["model_name", "engine"], self._health()
        lives = [(str(at), one.life) for at, one in enumerate(engines) if one.life is not None]
        of_name = {"inter_token_latency_seconds": [("0", self.between)]} | {
            f"kv_block_{name}_seconds": [(engine, getattr(life, name)) for engine, life in lives]
            for name in ("lifetime", "idle_before_evict", "reuse_gap")
        }
        for name, found in of_name.items():
            histogram = HistogramMetricFamily(f"vllm:{name}", name.replace("_", " "), labels=labels)
            for engine, gaps in found:
                histogram.add_metric([self._model, engine], gaps.buckets(), gaps.sum)
            yield histogram
        stats = [(str(at), one.stats) for at, one in enumerate(engines) if one.stats]
        for kind, figures in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS)):
            for name, (text, value) in figures.items():
                family = kind(f"vllm:{name}", text, labels=labels)
                for engine, one in stats:
                    family.add_metric([self._model, engine], value(one))
                yield family
        for part, names in (("speculation", SPECULATION), ("states", STATES)):
            for name, (text, field) in names.items():
                counter = CounterMetricFamily(f"vllm:{name}", text, labels=labels)
                for engine, one in stats:
                    if (counts := getattr(one, part)) is not None:
                        counter.add_metric([self._model, engine], getattr(counts, field))
                yield counter

    def _counter(self, name: str, text: str, *labels: str):
        names = ("model_name", "engine", *labels)
        counter = Counter(f"vllm:{name}", text, names, registry=self.registry)
        return counter if labels else counter.labels(self._model, "0")

    def _histogram(self, name: str, buckets: Sequence[float]):
        text = name.replace("_", " ")
        names = ("model_name", "engine")
        histogram = Histogram(f"vllm:{name}", text, names, buckets=buckets, registry=self.registry)
        return histogram.labels(self._model, "0")
