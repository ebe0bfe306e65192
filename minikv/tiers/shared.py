"""A store that other engines use too, as one engine sees it.

What is there is not known but asked for. What this engine has written, or seen there, it takes to
be there still, and does not write again: a question or a fetch that finds it gone puts that right.
"""

from time import perf_counter

from minikv.tiers.costs import Line
from minikv.tiers.names import Name
from minikv.tiers.store import Background, Fetch, Question, SharedTier, Unpack

MOST_KNOWN = 1 << 18  # names; more are forgotten, and their blocks perhaps written once again
FORGET_AFTER = 30.0  # seconds without a fetch, after which one that was slow is tried again
PATIENCE = 2.0  # seconds that the end of an engine waits for what is being written


class Shared:
    """One thread asks and reads, another writes: no question waits behind blocks on their way."""

    def __init__(self, tier: SharedTier):
        self.tier = tier
        self.writer, self.reader = Background(tier), Background(tier)
        self.known = self.reader.known = self.writer.known

    def __contains__(self, name: Name) -> bool:
        """Whether it is there, as far as is known."""
        return name in self.known

    def put(self, name: Name, identity: bytes, data: bytes) -> None:
        if len(self.known) >= MOST_KNOWN:
            self.known.clear()
        self.writer.put(name, identity, data)

    def ask(self, names: list[Name]) -> Question:
        return self.reader.ask(names)

    def get(self, names: list[Name], unpack: Unpack) -> Fetch:
        return self.reader.get(names, unpack)

    @property
    def reading(self) -> Line:
        """Seconds of a fetch by its bytes, as it was lately: a network that was slow once is not
        slow for ever, and where nothing is fetched nothing is measured."""
        if perf_counter() - self.reader.read_at > FORGET_AFTER:
            self.reader.reading = Line()
        return self.reader.reading

    def wait(self) -> None:
        self.reader.wait()
        self.writer.wait()

    def close(self) -> None:
        """Write what waits, if that is soon done, and end."""
        self.writer.close(PATIENCE)
        self.reader.close(PATIENCE / 4)
