"""A store that other engines use too, as one engine sees it.

An engine cannot know what is there, so it asks. What it has written or seen there it assumes to be
there still, and does not write again, until a question or a fetch finds it gone.
"""

from minikv.tiers.costs import FittedLine
from minikv.tiers.names import Name
from minikv.tiers.store import Background, Fetch, Question, SharedTier, Unpack

MOST_KNOWN = 1 << 18  # names; beyond that all are forgotten, and blocks may be written again
PATIENCE = 2.0  # seconds that an engine which ends waits for what is being written


class Shared:
    """One thread asks and reads, another writes: no question waits until blocks are written."""

    def __init__(self, tier: SharedTier, patience: float = PATIENCE):
        self.tier, self.patience = tier, patience
        self.writer, self.reader = Background(tier), Background(tier)
        self.known = self.reader.known = self.writer.known

    def __contains__(self, name: Name) -> bool:
        """Whether it is there, as far as this engine knows."""
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
    def reading(self) -> FittedLine:
        """Seconds of a fetch by its bytes, measured lately."""
        return self.reader.reading

    def wait(self) -> None:
        self.reader.wait()
        self.writer.wait()

    def close(self) -> None:
        """Write what waits, for `patience` seconds at most, and end."""
        self.writer.close(self.patience)
        self.reader.close(self.patience / 4)
