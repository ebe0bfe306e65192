"use strict";
// Draws what /events tells, and streams answers of /v1/completions. See minikv/serving/watch.py.
const $ = (id) => document.getElementById(id);
const make = (tag, className = "", text = "") =>
  Object.assign(document.createElement(tag), { className, textContent: text });
const plural = (number, word) => `${number} ${word}${number === 1 ? "" : "s"}`;
const oneLine = (text) => (text === null ? "(another client's)" : text.replaceAll("\n", "↵"));
const HUES = 6, STEPS = 160, KEPT = 6, FADES = 1500; // ms that an evicted block is marked
let key = sessionStorage.getItem("key") || "", watching = null, chosen = null, last = null;
let steps = [], evicted = new Map(), stops = new Set();

function headers() {
  const found = { "Content-Type": "application/json" };
  if (key) found.Authorization = `Bearer ${key}`;
  return found;
}

// Calls `each` with the content of each event, until the stream ends.
async function events(response, each) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n\n");
    rest = lines.pop();
    for (const line of lines)
      if (line.startsWith("data: {")) each(JSON.parse(line.slice(6)));
  }
}

// ── Asking ──────────────────────────────────────────────────────────────────

async function run(seed) {
  const card = make("article"), says = make("p", "", "waiting"), text = make("pre");
  const prompt = $("prompt").value, given = make("span", "given", prompt), stop = new AbortController();
  const answer = make("span");
  says.setAttribute("role", "status");
  text.append(given, answer);
  card.append(says, text);
  $("answers").prepend(card);
  while ($("answers").children.length > KEPT) $("answers").lastChild.remove();
  const body = {
    prompt, max_tokens: +$("tokens").value, temperature: +$("temperature").value, seed,
    stream: true, stream_options: { include_usage: true },
  };
  const began = performance.now();
  let first = 0, newest = 0, count = 0, usage = null, reason = "";
  stops.add(stop);
  try {
    const response = await fetch("v1/completions",
      { method: "POST", headers: headers(), body: JSON.stringify(body), signal: stop.signal });
    if (!response.ok) throw new Error((await response.json()).error.message);
    await events(response, (event) => {
      if (event.error) throw new Error(event.error.message);
      usage = event.usage || usage;
      for (const choice of event.choices) {
        newest = performance.now();
        first = first || newest;
        count += choice.token_ids.length;
        answer.textContent += choice.text;
        reason = choice.finish_reason || reason;
      }
      const gap = count > 1 ? (newest - first) / (count - 1) : 0;
      says.textContent = `first token after ${(first - began).toFixed(1)} ms, then ` +
        `${gap.toFixed(2)} ms per token; ${plural(count, "token")}` +
        (usage ? `, ${usage.prompt_tokens_details.cached_tokens} of ` +
          `${usage.prompt_tokens} prompt tokens were cached; ended by ${reason}` : "");
      text.scrollTop = text.scrollHeight;
    });
  } catch (error) {
    says.textContent = error.name === "AbortError" ? `stopped after ${plural(count, "token")}`
      : error.message;
  }
  stops.delete(stop);
}

const seed = () => Math.floor(Math.random() * 2 ** 31);
document.querySelector("form").addEventListener("submit", (event) => {
  event.preventDefault();
  run(seed());
});
$("twice").addEventListener("click", () => { run(seed()); run(seed()); });
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) run(seed());
  if (event.key === "Escape") stops.forEach((stop) => stop.abort());
});

// ── Watching ────────────────────────────────────────────────────────────────

async function watch() {
  if (watching) watching.abort();
  const mine = watching = new AbortController();
  try {
    const response = await fetch(`events?pace=${$("pace").value}`,
      { headers: headers(), signal: mine.signal });
    $("key-label").hidden = response.status !== 401 && !key;
    $("pace-label").hidden = Boolean(key); // one client must not slow the others down
    if (response.status === 401) {
      $("state").textContent = "this server asks for a key";
      return;
    }
    const models = await (await fetch("v1/models", { headers: headers() })).json();
    $("model").textContent = `serves ${models.data[0].id}`;
    $("state").textContent = "live";
    await events(response, (event) => (event.workers ? showWorkers(event) : show(event)));
  } catch (error) {
    if (mine.signal.aborted) return;
  }
  $("state").textContent = "the server is gone; trying again";
  setTimeout(() => mine === watching && watch(), 1000);
}
$("pace").addEventListener("change", watch);
$("key").addEventListener("change", () => {
  key = $("key").value;
  sessionStorage.setItem("key", key);
  watch();
});

function show(state) {
  const pool = $("pool"), holders = new Map(), texts = new Map(), now = performance.now();
  while (pool.children.length < state.ids) pool.append(make("div", "block"));
  for (const one of state.requests)
    for (const id of one.blocks) holders.set(id, [...(holders.get(id) || []), one.id]);
  for (const node of state.tree) for (const id of node.blocks) texts.set(id, node.text);
  if (last) // what was in the tree and is not any more
    for (const id of last.texts.keys()) if (!texts.has(id)) evicted.set(id, now);
  last = { state, holders, texts };
  let shared = 0;
  [...pool.children].forEach((cell, id) => {
    const by = holders.get(id) || [], lost = now - (evicted.get(id) ?? -Infinity) < FADES;
    shared += by.length > 1;
    cell.className = "block" + (by.length ? ` c${by[0] % HUES}` : "") +
      (by.length > 1 ? ` shared d${by[1] % HUES}` : "") + (texts.has(id) ? " tree" : "") +
      (lost ? " evicted" : "") + (id === chosen ? " chosen" : "");
  });
  const held = holders.size, only = [...texts.keys()].filter((id) => !holders.has(id)).length;
  // Where layers with a window give memory back, there are more ids than memory for whole blocks.
  const memory = state.ids > state.blocks ? `${state.used} used, of which ` : "";
  $("pool-says").textContent = `${state.blocks} of ${state.block_size} tokens: ${memory}${held} held ` +
    `(${shared} shared), ${only} only cached, ${state.blocks - state.used} free`;
  $("requests-says").textContent = `${state.running} running, ${state.waiting} waiting, ` +
    plural(state.preemptions, "preemption");
  $("requests").replaceChildren(...state.requests.map((one) => {
    const item = make("li");
    item.append(make("i", `block c${one.id % HUES}`),
      `${plural(one.blocks.length, "block")} for ${one.tokens} tokens, ${one.cached} from the cache: `,
      make("span", "text", oneLine(one.text)));
    return item;
  }));
  $("tree-says").textContent = `${plural(state.tree.length, "node")}; ` +
    `${(100 * state.hit_rate).toFixed(0)} % of prompt tokens were found so far`;
  showTree(state.tree, holders);
  showSteps(state.steps);
  tell();
}

function showTree(tree, holders) {
  const boxes = new Map(tree.map((node) => [node.blocks[0], make("div")]));
  const tops = [];
  for (const node of tree) {
    const box = boxes.get(node.blocks[0]), by = holders.get(node.blocks[0]) || [];
    box.prepend(make("i", `block tree${by.length ? ` c${by[0] % HUES}` : ""}` +
      (by.length > 1 ? ` d${by[1] % HUES}` : "")), plural(node.blocks.length, "block") + ": ",
    make("span", "text", oneLine(node.text)));
    const parent = boxes.get(node.parent);
    if (parent) { box.classList.add("under"); parent.append(box); } else tops.push(box);
  }
  $("tree").replaceChildren(...tops);
}

function showSteps(fresh) {
  steps = [...steps, ...fresh].slice(-STEPS);
  const canvas = $("steps"), css = getComputedStyle(document.documentElement);
  const scale = window.devicePixelRatio || 1, draw = canvas.getContext("2d");
  canvas.width = canvas.clientWidth * scale;
  canvas.height = 90 * scale;
  const width = canvas.width / STEPS, most = Math.max(8, ...steps.map(([computed]) => computed));
  const high = (number) => (canvas.height - 4) * Math.log2(1 + number) / Math.log2(1 + most);
  steps.forEach(([computed, generated], i) => {
    const x = canvas.width - (steps.length - i) * width;
    for (const [color, number] of [["--c1", computed], ["--c2", Math.min(computed, generated)]]) {
      draw.fillStyle = css.getPropertyValue(color);
      draw.fillRect(x, canvas.height - high(number), Math.max(1, width - scale), high(number));
    }
  });
  const newest = steps.at(-1);
  $("steps-says").textContent = newest ? `the last computed ${plural(newest[0], "token")} and ` +
    `generated ${newest[1]}; heights are logarithms` : "none yet";
}

function tell() {
  if (chosen === null || !last) return;
  const by = last.holders.get(chosen) || [], inTree = last.texts.has(chosen);
  const who = by.map((id) => `request ${id}`).concat(inTree ? ["the radix tree"] : []);
  const text = inTree && last.texts.get(chosen) !== null ? `; its node: ${oneLine(last.texts.get(chosen))}` : "";
  $("block-says").textContent = `Block ${chosen}: ` +
    (who.length ? `held by ${who.join(" and ")}${text}` : "free");
}
function choose(id) {
  const cells = $("pool").children;
  if (!cells.length) return;
  cells[chosen]?.classList.remove("chosen");
  chosen = Math.max(0, Math.min(cells.length - 1, id));
  cells[chosen].classList.add("chosen");
  tell();
}
$("pool").addEventListener("click", (event) => {
  const id = [...$("pool").children].indexOf(event.target);
  if (id >= 0) choose(id);
});
$("pool").addEventListener("keydown", (event) => {
  const columns = getComputedStyle($("pool")).gridTemplateColumns.split(" ").length;
  const move = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns }[event.key];
  if (!move) return;
  event.preventDefault();
  choose(chosen === null ? 0 : chosen + move);
});

function showWorkers({ workers }) {
  $("engine").hidden = true;
  $("workers").hidden = false;
  const row = (tag, cells) => {
    const found = make("tr");
    found.append(...cells.map((cell) => make(tag, "", cell)));
    return found;
  };
  $("workers").querySelector("table").replaceChildren(
    row("th", ["worker", "process", "running", "waiting", "blocks used", "cached", "found", "tokens"]),
    ...workers.map(({ pid, stats }, i) => row("td", [i, pid ?? "down", ...(stats ? [
      stats.running, stats.waiting, `${stats.blocks_used} of ${stats.blocks_total}`,
      stats.blocks_cached, `${stats.hit_tokens} of ${stats.looked_up_tokens}`, stats.generated_tokens,
    ] : Array(6).fill("–"))])));
}

watch();
