"""Checks a built site: links, addresses of other machines, and sizes.

    python docs/site/check.py [folder]      prints what is wrong; exit status 1 if anything is

Writes `external-links.txt` beside the site: every address elsewhere, with a page that links to it.
Whether those answer is not asked, for the checks run without a network.
"""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADS = {"img": "src", "script": "src", "link": "href", "source": "src", "iframe": "src"}
MOST_BYTES = 1_500_000  # of a page with its pictures, without what all pages share


class Page(HTMLParser):
    """What a page links to, what it loads, and the places in it that a link may lead to."""

    def __init__(self, path: Path):
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.places: set[str] = set()
        self.twice: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        if "id" in given:
            (self.twice if given["id"] in self.places else self.places).add(given["id"])
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        elif given.get(LOADS.get(tag, "")) and given.get("rel") not in (
            "next",
            "prev",
            "canonical",
        ):
            self.loads.append(given[LOADS[tag]])

    handle_startendtag = handle_starttag


def problems(site: Path) -> tuple[list[str], dict[str, str], dict[str, int]]:
    """(what is wrong, a page for each external link, bytes of each page with its pictures)."""
    pages = {
        path: Page(path) for path in sorted(site.rglob("*.html")) if "_static" not in path.parts
    }
    wrong: list[str] = []
    external: dict[str, str] = {}
    sizes: dict[str, int] = {}
    for path, page in pages.items():
        name = path.relative_to(site).as_posix()
        wrong += [f"{name}: two elements have the id {place!r}" for place in sorted(page.twice)]
        files = {path}
        for address in page.links + page.loads:
            scheme, netloc, target, _, place = urlsplit(address)
            if scheme in ("http", "https") or netloc:
                external.setdefault(address, name)
                if address in page.loads:
                    wrong.append(f"{name}: loads {address}")
                continue
            if scheme:
                continue
            file = (path.parent / unquote(target)).resolve() if target else path
            if not file.is_file():
                wrong.append(f"{name}: {address} leads to nothing")
            elif place and file in pages and unquote(place) not in pages[file].places:
                wrong.append(f"{name}: {address} leads to no place of that page")
            if address in page.loads and file.suffix in (".svg", ".png", ".gif"):
                files.add(file)
        sizes[name] = sum(file.stat().st_size for file in files if file.is_file())
        if sizes[name] > MOST_BYTES:
            wrong.append(f"{name}: {sizes[name]:,} bytes, more than {MOST_BYTES:,}")
    return wrong, external, sizes


def main(site: Path) -> int:
    wrong, external, sizes = problems(site)
    listed = "".join(f"{address}\t{page}\n" for address, page in sorted(external.items()))
    site.with_name("external-links.txt").write_text(listed, encoding="utf-8")
    largest = max(sizes, key=lambda name: sizes[name])
    print(
        f"{len(sizes)} pages; the largest is {largest} with {sizes[largest] / 1000:,.0f} kB; "
        f"{len(external)} addresses elsewhere, in {site.with_name('external-links.txt').name}"
    )
    print("\n".join(wrong))
    return bool(wrong)


if __name__ == "__main__":
    root = Path(__file__).parents[2]
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else root / "build" / "site").resolve()))
