"""A film for pages without a kernel: all frames of a player, and the buttons to look at them.

    film.html("the block tables", frames, captions, texts, start=0)

The frames of a film are much alike, so they are stored as the lines of SVG that occur in any of
them, each once, and per frame the numbers of its lines. Forty frames of 25 kB take 12 kB.
Without JavaScript the page shows the first frame and its caption.
"""

import json
import zlib
from base64 import b64encode
from collections.abc import Sequence
from html import escape

from minikv.course.pictures import style

SCRIPT = """(() => {
  const film = document.currentScript.parentElement;
  const [back, play, next] = film.querySelectorAll("button");
  const slider = film.querySelector("input"), picture = film.querySelector("img");
  const [caption, text] = film.querySelectorAll("[data-words]");
  const stored = film.querySelector("[data-frames]").dataset.frames;
  const bytes = Uint8Array.from(atob(stored), (c) => c.charCodeAt(0));
  const inflate = new DecompressionStream("deflate");
  new Response(new Blob([bytes]).stream().pipeThrough(inflate)).json().then((all) => {
    const lines = ([first, count]) => all.lines.slice(first, first + count).join("\\n");
    let timer = null;
    const show = () => {
      const step = Number(slider.value), svg = all.frames[step].map(lines).join("\\n");
      picture.src = "data:image/svg+xml," + encodeURIComponent(svg);
      picture.alt = `${film.getAttribute("aria-label")}, step ${step} of ${slider.max}`;
      slider.setAttribute("aria-valuetext", `step ${step} of ${slider.max}`);
      slider.nextElementSibling.textContent = `${step} of ${slider.max}`;
      caption.innerHTML = all.captions[step];
      text.innerHTML = all.texts[step] ?? "";
    };
    const stop = () => { clearInterval(timer); timer = null; play.textContent = "▶ Play"; };
    const move = (step) => { slider.value = step; show(); };
    const at = () => Number(slider.value), last = Number(slider.max);
    back.onclick = () => { stop(); move(at() - 1); };
    next.onclick = () => { stop(); move(at() + 1); };
    slider.oninput = () => { stop(); show(); };
    play.onclick = () => {
      if (timer) return stop();
      if (at() === last) move(0);
      play.textContent = "⏸ Pause";
      timer = setInterval(() => { move(at() + 1); if (at() === last) stop(); }, all.interval);
    };
    film.firstElementChild.style.display = "flex";
  });
})();"""


def packed(frames: Sequence[bytes], **beside: object) -> str:
    """The frames, each line of SVG once, and what stands beside them: JSON, deflated, base64."""
    numbers: dict[str, int] = {}
    runs: list[list[list[int]]] = []  # of each frame: [first line, how many]
    for frame in frames:
        runs.append([])
        for line in frame.decode().split("\n"):
            number = numbers.setdefault(line, len(numbers))
            if runs[-1] and sum(runs[-1][-1]) == number:
                runs[-1][-1][1] += 1
            else:
                runs[-1].append([number, 1])
    stored = {"lines": list(numbers), "frames": runs, **beside}
    text = json.dumps(stored, ensure_ascii=False, separators=(",", ":"))
    return b64encode(zlib.compress(text.encode(), 9)).decode()


def html(
    what: str,
    frames: Sequence[bytes],
    captions: Sequence[str],
    texts: Sequence[str],
    start: int,
    interval: int,
) -> str:
    """`frames` are SVG. `captions` are HTML, one per frame, and so are `texts`, if there are any.
    A step is shown for `interval` ms."""
    last, name = len(frames) - 1, escape(what)
    data = packed(frames, captions=captions, texts=texts, interval=interval)
    first = b64encode(frames[start]).decode()
    button = "<button type='button' aria-label='{}'>{}</button>"
    return (
        f"<!-- a film -->\n<div class='film' role='group' aria-label='{name}' "
        f"style='max-width:{style.SHOWN}px'>"
        "<div style='display:none;flex-wrap:wrap;gap:6px;align-items:center'>"
        f"{button.format(f'One step of {name} back', '◀ Back')}"
        f"{button.format(f'Play or pause {name}', '▶ Play')}"
        f"{button.format(f'The next step of {name}', 'Next ▶')}"
        f"<input type='range' style='flex:1 1 200px' min='0' max='{last}' value='{start}' "
        f"aria-label='The step of {name} that is shown' aria-valuetext='step {start} of {last}'>"
        f"<span>{start} of {last}</span></div>"
        f"<div data-words aria-live='polite'>{captions[start]}</div>"
        f"<div style='overflow-x:auto'><img style='width:100%;min-width:{style.LEAST}px;"
        "max-width:none;box-sizing:border-box;padding:4px;background:white;opacity:0.9;"
        f"border:1px solid {style.EDGE};border-radius:6px' "
        f"alt='{name}, step {start} of {last}' src='data:image/svg+xml;base64,{first}'></div>"
        f"<div data-words>{texts[start] if texts else ''}</div>"
        f"<span hidden data-frames='{data}'></span><script>{SCRIPT}</script></div>"
    )
