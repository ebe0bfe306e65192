"""Which solutions of a class are more alike than chance: a place to look, and no verdict.

Winnowing (Schleimer, Wilkerson and Aiken, 2003), the method of MOSS: a text is the set of the
fingerprints of its runs of tokens, thinned out so that any long common run shares one. Names,
texts, comments and layout are left out first, so renaming changes nothing. Fingerprints of the
skeleton and the reference do not count, nor those that a good part of the class has: what an
exercise gives, or leads everybody to, tells nothing.
"""

import builtins
import hashlib
import io
import keyword
import tokenize
from collections import Counter
from collections.abc import Mapping
from itertools import combinations

RUN = 12  # tokens of a fingerprint: about two lines
WINDOW = 8  # of which one fingerprint is kept
COMMON = 0.2  # a fingerprint that this share of a class has is everybody's
LEAST = 8  # fingerprints that both must have
ALIKE = 0.6  # share of the smaller text's fingerprints, from which a pair is told
LAYOUT = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENCODING, tokenize.ENDMARKER,
}  # fmt: skip


def pairs_alike(
    texts: Mapping[str, str], given: tuple[str, ...] = ()
) -> list[tuple[float, str, str]]:
    """(share in common, one name, the other) of the texts by name, the most alike first."""
    known = set[int]().union(*(fingerprints(text) for text in given))
    found = {name: fingerprints(text) - known for name, text in texts.items()}
    holders = Counter(one for own in found.values() for one in own)
    most = max(2.0, COMMON * len(texts))
    rare = {name: {o for o in own if holders[o] <= most} for name, own in found.items()}
    rare = {name: own for name, own in rare.items() if len(own) >= LEAST}
    shares = [
        (len(rare[one] & rare[other]) / min(len(rare[one]), len(rare[other])), one, other)
        for one, other in combinations(rare, 2)
    ]
    return sorted((pair for pair in shares if pair[0] >= ALIKE), key=lambda p: (-p[0], p[1:]))


def nearness(text: str, skeleton: str, reference: str) -> float:
    """The share of a text's fingerprints, without the skeleton's, that the reference has; 0 of a
    text that has too few."""
    own = fingerprints(text) - fingerprints(skeleton)
    return len(own & fingerprints(reference)) / len(own) if len(own) >= LEAST else 0.0


def fingerprints(text: str) -> set[int]:
    tokens = _tokens(text)
    runs = [" ".join(tokens[i : i + RUN]) for i in range(len(tokens) - RUN + 1)]
    hashes = [int.from_bytes(hashlib.blake2b(run.encode(), digest_size=8).digest()) for run in runs]
    windows = max(1, len(hashes) - WINDOW + 1)
    return {min(hashes[i : i + WINDOW]) for i in range(windows)} if hashes else set()


def _tokens(text: str) -> list[str]:
    """Of a text that ends too early or is no Python, those up to there."""
    found = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.NAME:
                own = not keyword.iskeyword(token.string) and not hasattr(builtins, token.string)
                found.append("name" if own else token.string)
            elif token.type == tokenize.STRING:
                found.append("text")
            elif token.type not in LAYOUT:
                found.append(token.string)
    except (tokenize.TokenError, SyntaxError):
        pass
    return found
