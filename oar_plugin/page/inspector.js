"use strict";
// Unpacks the data of inspector.py, computes weights, and draws the responses near the window.
//
// SECOND IMPLEMENTATION: a page without network cannot ask Python, so `GATES`, `weightsOf` and `diagnostics` repeat credit/gate.py,
// estimator.py and credit/diagnostics.py. tests/page/test_inspector.py holds them equal on random input, and their tables too.
//
// Text of a model reaches the page as text (`textContent`), never as HTML.

const TINY = 2.2250738585072014e-308;  // smallest normal float64
const NEAR = "1500px";  // responses are drawn within this distance of the window
const byId = id => document.getElementById(id);
const form = byId("controls"), {elements} = form;
let data, responses, steps;
let cards = [], pin = null, waiting = 0;

// ---- data

async function load() {
  const packed = new Blob([Uint8Array.from(atob(byId("data").textContent), c => c.charCodeAt(0))]).stream();
  const block = new Uint8Array(await new Response(packed.pipeThrough(new DecompressionStream("deflate"))).arrayBuffer());
  let at = block.indexOf(10), id = 0, start = 0;
  data = JSON.parse(new TextDecoder().decode(block.subarray(0, at++)));
  const column = Type => {
    const size = Type.BYTES_PER_ELEMENT, bytes = new Uint8Array(size * data.count);
    for (let plane = 0; plane < size; plane++) for (let i = plane; i < bytes.length; i += size) bytes[i] = block[at++];
    return new Type(bytes.buffer);
  };
  const rounded = sign => Float32Array.from(column(Uint16Array), x => x === 65535 ? NaN : sign * Math.expm1(x / 100) / 5);
  const columns = {token: column(Uint32Array), logProb: rounded(-1), entropy: rounded(1)};
  const importance = Object.keys(data.importances).map(name => [name, column(Float32Array)]);
  columns.recorded = data.recorded ? column(Float32Array) : new Float32Array();
  data.tokens.id = data.tokens.idAfterLast.map(more => id += more);
  responses = data.responses.step.map((_, i) => {
    const r = Object.fromEntries(Object.entries(data.responses).map(([name, values]) => [name, values[i]]));
    const own = pairs => Object.fromEntries(pairs.map(([name, values]) => [name, values.subarray(start, start + r.length)]));
    Object.assign(r, own(Object.entries(columns)), {importance: own(importance), segment: []});
    Object.assign(r, {scores: {__proto__: null}, credit: {__proto__: null}});  // names may be of any letters
    for (const name in r.importance) r.importance[name] = r.importance[usedFor(r, name)];
    for (let k = 0; k < r.segments.length; k += 2) {
      for (let n = r.segments[k + 1]; n > 0; n--) r.segment.push(data.segmentNames[r.segments[k]]);
    }
    r.reasoning = Uint32Array.from(r.segment.keys()).filter(place => r.segment[place] === "reasoning");
    start += r.length;
    return r;
  });
  steps = [...new Set(data.responses.step)].sort((a, b) => a - b);
}

// The importance shown as `name` for a response: the fallback's, where the response does not have this one.
const usedFor = (r, name) => r.importances.includes(name) ? name : r.importances[0] ?? name;
const ownOf = (r, list) => list.filter(name => usedFor(r, name) === name);

// Control and format characters, odd spaces and half characters are shown as <U+...>.
const visible = text => text.replaceAll("\t", "⇥").replace(
  /(?!\n)[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}\u202f\u2065]/gu,
  c => `⟨U+${c.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`);
const textOf = (r, i) => data.tokens.text[r.token[i]];
const shownText = text => text.trim() ? visible(text).replaceAll("\n", "⏎\n")
  : visible(text).replaceAll(" ", "␣").replaceAll("\n", "⏎\n") || "∅";

// ---- weights, in float64

function quantile(sorted, tau) {
  const last = sorted.length - 1, rank = tau * last, lower = Math.floor(rank), share = rank - lower;
  const below = sorted[lower], above = sorted[Math.min(lower + 1, last)];
  return share < 0.5 ? below + share * (above - below) : above - (above - below) * (1 - share);
}

function split(score, sorted, tau, high, low) {  // the lowest score is never above
  const limit = quantile(sorted, tau);
  return score.map(x => x >= limit && x > sorted[0] ? high : low);
}

const GATES = {  // from the scores of a response's reasoning tokens to weights before scaling
  two_level: (score, sorted, {tau, beta}) => split(score, sorted, tau, 1 + beta, 1),
  bi_level(score, sorted, {tau, beta, floor}) {
    const low = Math.log1p(sorted[0]), span = Math.log1p(sorted.at(-1)) - low, level = x => (Math.log1p(x) - low) / span;
    const limit = quantile(sorted.map(level), tau);
    return score.map(level).map(s => s < limit ? Math.max(s / Math.max(limit, TINY), floor)
      : 1 + beta * (s - limit) / Math.max(1 - limit, TINY));
  },
  top_only: (score, sorted, {tau}) => split(score, sorted, tau, 1, 0),
  z_score(score) {
    const logs = score.map(x => Math.log(Math.max(x, 0) + 1e-8)), mean = sum(logs) / logs.length;
    const deviation = Math.sqrt(sum(logs.map(x => (x - mean) ** 2)) / logs.length + 1e-8);
    return logs.map(x => Math.min(Math.max(1 + (x - mean) / deviation / 2, 0.5), 5));
  },
};

const sum = values => values.reduce((total, x) => total + x, 0);
const gateNow = () => elements.gate.value === "run" ? data.run  // exactly as run, or as the controls say
  : {gate: elements.gate.value, tau: +elements.tau.value, beta: +elements.beta.value, floor: +elements.floor.value};

const settingsOf = gate => Object.hasOwn(data.gates, gate) ? data.gates[gate].settings : [];

function scoresOf(r, name) {  // of the reasoning tokens; `sorted` is null if a score is not finite
  const score = r.scores[name]?.score ?? Float64Array.from(r.reasoning, i => r.importance[name][i]);
  return r.scores[name] ??= {score, sorted: score.length && score.every(Number.isFinite) ? score.slice().sort() : null};
}

// Weights of a response's reasoning tokens, and the response's status.
function weightsOf(score, sorted, settings, arbitraryScale) {
  if (!sorted) return {status: "non_finite"};
  if (!(sorted.at(-1) > sorted[0])) return {status: "constant"};
  const mean = sum(score) / score.length;
  if (arbitraryScale && !data.gates[settings.gate].orderOnly && mean > 0) {
    [score, sorted] = [score, sorted].map(values => values.map(x => x / mean));
  }
  const raw = GATES[settings.gate](score, sorted, settings), scale = raw.length / Math.max(sum(raw), TINY);
  return {weights: raw.map(weight => weight * scale), status: "scored"};
}

// {weights: one per token, or null where there is no credit; status: of the response under these settings}
const credit = (r, name) => r.credit[name] ??= weigh(r, name, gateNow());

function weigh(r, name, settings) {
  if (!r.weighted) return {weights: null, status: r.status};
  const ofRun = r.importance[name] === r.importance[data.runImportance];
  if (data.recorded && settings === data.run && ofRun) return {weights: r.recorded, status: r.status};
  const weights = new Float32Array(r.length).fill(1);
  if (r.status !== "scored" && r.status !== "constant") return {weights, status: r.status};
  if (!Object.hasOwn(GATES, settings.gate) || !name) return {weights: null, status: r.status};
  const {score, sorted} = scoresOf(r, name);
  const own = weightsOf(score, sorted, settings, data.importances[usedFor(r, name)].arbitraryScale);
  own.weights?.forEach((weight, i) => { weights[r.reasoning[i]] = weight; });
  return {weights, status: own.status};
}

// oar/ess_ratio and oar/top10_mass of one response; null where no weights apply.
function diagnostics(r, name) {
  const {weights, status} = credit(r, name), n = r.reasoning.length;
  if (!weights || status !== "scored" || !n) return null;
  const w = Float64Array.from(r.reasoning, i => Math.abs(weights[i])).sort();
  const tenth = Math.fround(n * Math.fround(0.1));
  const take = Math.round(tenth) - (tenth % 1 === 0.5 && Math.round(tenth) % 2);  // torch rounds halves to even
  const figures = {ess: sum(w) ** 2 / (n * sum(w.map(x => x * x))), top: sum(w.subarray(n - Math.max(1, take))) / sum(w)};
  return Number.isFinite(figures.ess) ? figures : null;
}

function rank(r, name, i) {  // 1: the largest score; equal scores share the better rank; NaN: the token has no score
  const scores = scoresOf(r, name);
  scores.ranks ??= new Map(Array.from(scores.sorted ?? [], (x, k) => [x, r.reasoning.length - k]));
  return r.segment[i] === "reasoning" ? scores.ranks.get(r.importance[name][i]) ?? NaN : NaN;
}

// ---- colours

const hue = name => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`);
const [BLUE, ORANGE, PURPLE, GREEN, ROSE] = ["blue", "orange", "purple", "green", "rose"].map(hue);
const tint = (hue, strength) => [hue, Math.max(0, Math.min(1, strength)) || 0];
const css = ([hue, strength]) => `rgb(${hue} / ${(0.72 * strength).toFixed(2)})`;
const format = x => Number.isFinite(x) ? String(+x.toPrecision(3)) : "–";
const signed = x => (x > 0 ? "+" : "") + format(x);

// The strongest push in a group, at least that of weight 2: under plain GRPO, with weights of 1, no token looks boosted.
const strongest = (r, name) => Math.max(TINY, ...r.siblings.map(s =>
  Math.abs(s.advantage) * (credit(s, name).weights?.reduce((top, w) => Number.isFinite(w) ? Math.max(top, Math.abs(w)) : top, 2) ?? 0)));

// For a response and an importance: a function of a token's place. value: the number in histograms; tint: the colour; null: none.
const weightOf = (r, name) => { const {weights} = credit(r, name); return weights && (i => weights[i]); };
const ofTool = (r, i) => r.segment[i] === "tool";
const logImportance = (r, name) => name && (i => Math.log10(r.importance[name][i]));
const COLOURS = {
  push: {
    value(r, name) {
      const weight = r.advantage === null ? null : weightOf(r, name);
      return weight && (i => ofTool(r, i) ? NaN : weight(i) * r.advantage);
    },
    tint(r, name) {
      const top = strongest(r, name), value = this.value(r, name);
      return value && (i => tint(value(i) < 0 ? ORANGE : BLUE, Math.abs(value(i)) / top));
    },
  },
  weight: {
    value: weightOf,
    tint(r, name) {
      const weight = weightOf(r, name);
      return weight && (i => weight(i) < 1 ? tint(GREEN, 0.6 * (1 - weight(i))) : tint(PURPLE, (weight(i) - 1) / 2));
    },
  },
  rank: {value: logImportance, tint: (r, name) => name && (i => tint(PURPLE, 1 - (rank(r, name, i) - 1) / r.reasoning.length))},
  importance: {
    value: logImportance,
    tint(r, name) {
      const sorted = name && scoresOf(r, name).sorted, log = x => Math.log(Math.max(TINY, x));
      if (!sorted) return null;
      const low = log(sorted[Math.floor(0.05 * sorted.length)]), high = log(sorted.at(-1));
      return i => tint(PURPLE, (log(r.importance[name][i]) - low) / (high - low));
    },
  },
  logProb: {value: r => i => r.logProb[i], tint: r => i => tint(ROSE, 1 - Math.exp(r.logProb[i]))},
  entropy: {value: r => i => r.entropy[i], tint: r => i => tint(GREEN, 1 - Math.exp(-r.entropy[i]))},
};

// ---- what is chosen

const colourNow = () => COLOURS[elements.colour.value];
const names = () => elements.importance.value === "*" ? Object.keys(data.importances) : [elements.importance.value];
const nameNow = () => names().length > 1 ? data.runImportance : names()[0];
const lower = text => text.toLowerCase().length === text.length ? text.toLowerCase() : text;

function make(tag, properties, ...inside) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...inside);
  return node;
}

function setUp() {
  const logged = name => responses.some(r => r[name].some(Number.isFinite));
  const options = (values, texts = values.map(visible)) => values.map((value, i) => make("option", {value, textContent: texts[i]}));
  const known = Object.keys(data.importances);
  elements.importance.append(...options(known), ...known.length > 1 ? options(["*"], ["compare all"]) : []);
  elements.importance.append(...known.length ? [] : options([""], ["none"]));
  elements.importance.value = data.runImportance;
  offer("outcome", responses.map(outcomeOf));
  offer("status", responses.map(r => credit(r, nameNow()).status), statusText);
  offer("source", data.responses.source);
  elements.step.max = steps.length;
  elements.step.parentNode.hidden = steps.length < 2;
  for (const node of document.querySelectorAll("[data-segment]")) {
    node.hidden = !responses.some(r => r.segment.includes(node.dataset.segment));
  }
  const lacking = ["logProb", "entropy"].filter(name => !logged(name));
  for (const option of elements.colour.options) option.hidden = lacking.includes(option.value);
  if (data.responses.weighted.includes(true)) elements.colour.value = data.responses.advantage.some(Boolean) ? "push" : "weight";
  else elements.colour.value = ["logProb", "entropy"].find(logged) ?? "weight";
}

// A filter's options: what occurs, and how often. What is chosen stays, also where another gate leaves nothing of it.
function offer(filter, values, text = visible) {
  const {[filter]: select} = elements, {value: chosen} = select, counts = new Map(chosen ? [[chosen, 0]] : []);
  for (const value of values.filter(Boolean)) counts.set(value, (counts.get(value) ?? 0) + 1);
  const options = [...counts].sort().map(([value, count]) => make("option", {value, textContent: `${text(value)} (${count})`}));
  select.replaceChildren(select.options[0], ...options);
  select.value = chosen;
}

function passes(r) {
  const [outcome, status, source, step] = ["outcome", "status", "source", "step"].map(name => elements[name].value);
  return (!outcome || outcomeOf(r) === outcome) && (!source || r.source === source)
    && (!status || credit(r, nameNow()).status === status) && (+step === 0 || r.step === steps[step - 1])
    && (!elements.search.value || hits(r).length > 0 || lower(r.prompt).includes(lower(elements.search.value)));
}

// Places of the tokens that the searched text touches.
function hits(r) {
  const query = lower(elements.search.value), places = [];
  r.text ??= lower(Array.from(r.token, t => data.tokens.text[t]).join(""));
  const next = from => query ? r.text.indexOf(query, from) : -1;
  for (let hit = next(0), from = 0, i = 0; hit >= 0; hit = next(hit + query.length)) {
    for (; i < r.length && from < hit + query.length; from += textOf(r, i++).length) {
      if (from + textOf(r, i).length > hit) places.push(i);
    }
  }
  return places;
}

// The most similar sibling of the other outcome, and how many first tokens are the same: the place of the first difference.
function difference(r) {
  let best = {place: -1};
  for (const other of r.siblings.filter(s => s.right !== r.right && s.right !== null && r.right !== null)) {
    let place = 0;
    while (place < r.length && r.token[place] === other.token[place]) place++;
    if (place > best.place) best = {place, other};
  }
  return best;
}

function differenceText(r, {place, other}) {
  const outcome = other.right ? "right" : "wrong";
  if (place === other.length && place === r.length) return `the same tokens as a ${outcome} response`;
  if (place === r.length) return `a ${outcome} response begins with these ${place} tokens`;
  if (place === 0) return `differs from each ${outcome} response at the first token`;
  return `like a ${outcome} response up to token ${place}`;
}

// The start of what the user asks, without the system prompt and the marks of chat templates.
const ASKS = /<[^<>\n]*>\s*user\b\s*(?:<[^<>\n]*>)?|<[^<>\n]*\buser\b[^<>\n]*>|\[INST\]|^user(?::|$)/gimu;
const ASKED = /<[^<>\s]*[|｜_][^<>\n]*>|<\/s>|\[\/INST\]|^assistant(?::|$)/imu;
const oneLine = text => text.replace(/\s+/g, " ").trim();
const questionOf = prompt => oneLine(prompt.split(ASKS).at(-1).split(ASKED)[0]) || oneLine(prompt);

// ---- drawing

const nice = least => {  // the smallest of 1, 2, 5, 10, 20, ... that is at least `least`
  const ten = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map(x => x * ten).find(x => x >= 0.999 * least);
};

// Bars between multiples of a round number, a line at zero, and an axis, which has zero except for logarithms.
function histogram(list, name) {
  const unknown = () => NaN, {value} = colourNow(), ends = value === logImportance ? [Infinity, -Infinity] : [0, 0];
  const values = list.flatMap(r => Array.from(r.reasoning, value(r, name) || unknown)).filter(Number.isFinite);
  if (!values.length) return "no numbers";
  const [low, high] = values.reduce(([a, b], x) => [Math.min(a, x), Math.max(b, x)], ends);
  const wide = nice((high - low || 1) / 60), first = Math.floor(low / wide), bins = Math.floor(high / wide) - first + 1;
  const counts = new Uint32Array(bins), apart = nice(wide * bins / 6), ticks = [];
  for (const x of values) counts[Math.floor(x / wide) - first]++;
  const most = counts.reduce((a, b) => Math.max(a, b)), at = x => x / wide - first;
  const bars = Array.from(counts, (count, i) => count ? `M${i + 0.1} 20v${-(1 + 19 * count / most)}h.8V20z` : "").join("");
  for (let k = Math.ceil(first * wide / apart); at(k * apart) <= bins; k++) {
    const tick = make("span", {className: k ? "" : "zero", textContent: format(k * apart)});
    tick.style.left = `${100 * at(k * apart) / bins}%`;
    ticks.push(tick);
  }
  const made = make("div", {className: "histogram", role: "img"});
  made.ariaLabel = `${values.length} tokens by ${byId("histogramTitle").textContent}, from ${format(low)} to ${format(high)}`;
  made.innerHTML = `<svg viewBox="0 0 ${bins} 20" preserveAspectRatio="none"><path d="${bars}"/><path class="zero" d="M${-first} 0V20"/></svg>`;
  made.prepend(make("span", {className: "most", textContent: `highest bar: ${most.toLocaleString("en")} tokens`}));
  made.append(make("div", {className: "ticks"}, ...ticks));
  return made;
}

const STATUS = {  // of credit/diagnostics.py, where the name is not enough
  scored: "weights applied", not_needed: "advantage 0: weights change nothing", truncated: "cut off at the length limit",
  no_reasoning: "no reasoning before the answer", non_finite: "importance not finite", constant: "all importances equal",
  not_scored: "no scores arrived", timed_out: "masked copies took too long", too_long: "no room for masked copies",
  aborted: "masked copies were dropped", engine_failed: "the rollout engine failed", answer_too_long: "the answer is too long",
  out_of_memory: "not enough memory", search_failed: "an answer pattern failed", learning: "too few scored tokens so far",
};
const statusText = name => Object.hasOwn(STATUS, name) ? STATUS[name] : visible(name.replaceAll("_", " "));
const figuresText = figures => `ESS ${figures.ess.toFixed(2)} · top 10 % has ${(100 * figures.top).toFixed(0)} %`;
const joined = (...parts) => visible(parts.filter(Boolean).join(" · "));
const OUTCOMES = {right: "✓", wrong: "✗", "no reward": "–"};
const outcomeOf = ({right}) => Object.keys(OUTCOMES)[right === null ? 2 : right ? 0 : 1];

function head(card) {
  const {r} = card, name = nameNow(), {status, weights} = credit(r, name), figures = diagnostics(r, name);
  const chip = (textContent, className = "", title = "") => make("span", {className: `chip ${className}`, textContent, title});
  const [arrow, way] = r.advantage > 0 ? ["▲", "up"] : r.advantage < 0 ? ["▼", "down"] : ["●", ""];
  const outcome = r.right === null ? "no reward" : `${r.right ? "✓" : "✗"} reward ${format(r.reward)}`;
  const parts = [chip(outcome, r.right === false ? "wrong" : "right"),
    chip(`${arrow} advantage ${r.advantage === null ? "–" : signed(r.advantage)}`, way)];
  if (status !== "scored") parts.push(chip(statusText(status) + (status === "not_needed" ? "" : " → GRPO"), "fallback"));
  else if (!weights) parts.push(chip("no weights recorded", "fallback"));
  if (usedFor(r, name) !== name) parts.push(chip(`importance: ${visible(usedFor(r, name))}`, "fallback"));
  if (figures) parts.push(chip(figuresText(figures), "", "effective sample size: 1 when the credit is even"));
  const {place, other} = card.differs = difference(r), about = [];
  if (other) {
    const textContent = `◆ ${differenceText(r, card.differs)}`, title = `the most similar one: ${visible(other.uid)}`;
    about.push(place === r.length ? make("span", {textContent, title})
      : make("button", {type: "button", textContent, title, onclick: () => pinAt(card, place, "center")}));
  }
  about.push(make("span", {className: "uid", textContent: joined(`${r.length} tokens`, r.uid), title: visible(r.uid)}));
  card.head.replaceChildren(make("div", {className: "chips"}, ...parts), make("div", {className: "more"}, ...about));
}

// The whole response as one line of pixels. A pixel that several tokens share shows the strongest.
function strip({r, strip: canvas, differs}) {
  const pen = canvas.getContext("2d"), shade = colourNow().tint(r, nameNow());
  canvas.width = Math.max(1, canvas.clientWidth);
  const wide = canvas.width / r.length, seen = new Float32Array(canvas.width);
  const fill = (colour, i, y, high, width = Math.ceil(wide)) => {
    pen.fillStyle = colour;
    pen.fillRect(Math.floor(i * wide), y, width, high);
  };
  for (let i = 0; i < r.length; i++) {
    const colour = shade ? shade(i) : [BLUE, 0], at = Math.floor(i * wide);
    if (r.segment[i] === "answer") fill("gray", i, 11, 3, Math.max(2, wide));
    if (colour[1] <= seen[at]) continue;
    seen[at] = colour[1];
    pen.clearRect(at, 0, Math.ceil(wide), 10);
    fill(css(colour), i, 0, 10);
  }
  if (differs.place in r.token) fill("gray", differs.place, 0, 14, 3);
}

function row(card, name) {
  const tokens = make("div", {className: "tokens", tabIndex: 0, role: "group", ariaLabel: "tokens; Enter pins one"});
  const label = make("div", {className: "who"}), spans = [];
  for (let i = 0; i < card.r.length; i++) {
    // The space before a word is outside of the word's box, so that lines break there.
    const text = textOf(card.r, i), gap = text.startsWith(" ") && text.trim() ? " " : "";
    const className = `t ${card.r.segment[i]}${i === card.differs.place ? " differs" : ""}`;
    spans.push(make("span", {className, textContent: shownText(text.slice(gap.length)), place: i, name}));
    tokens.append(gap, spans[i]);
  }
  card.rows.append(make("div", {}, label, tokens));
  return {name, spans, label};
}

function paint(card) {
  head(card);
  strip(card);
  card.shown ??= (names().length > 1 ? ownOf(card.r, names()) : names()).map(name => row(card, name));
  const places = new Set(hits(card.r));
  for (const {name, spans, label} of card.shown) {
    const shade = colourNow().tint(card.r, name), figures = diagnostics(card.r, name);
    label.textContent = card.shown.length > 1 ? `${visible(name)}${figures ? ` · ${figuresText(figures)}` : ""}` : "";
    spans.forEach((span, i) => {
      span.style.backgroundColor = shade ? css(shade(i)) : "";
      span.classList.toggle("hit", places.has(i));
    });
  }
  card.rows.style.minHeight = "";
}

// Far from the window, a response keeps its height and nothing else.
function clear(card) {
  card.rows.style.minHeight = `${card.rows.offsetHeight || 200}px`;
  card.rows.replaceChildren();
  card.shown = null;
}

const watch = new IntersectionObserver(entries => entries.forEach(({target: {card}, isIntersecting}) => {
  card.near = isIntersecting;
  if (card.near && !card.shown) paint(card);
  else if (!card.near && card.shown && pin?.card !== card) clear(card);
}), {rootMargin: `${NEAR} 0px`});

function build() {
  const groups = new Map();
  for (const r of responses) {
    const key = JSON.stringify([r.step, r.group]);
    r.siblings = groups.get(key) ?? [];
    r.siblings.push(r);
    groups.set(key, r.siblings);
  }
  const asked = [...groups.values()].map(([{prompt}]) => questionOf(prompt)), [one = ""] = asked;
  let same = 0;
  while (same < one.length && asked.every(text => text[same] === one[same])) same++;
  same = new Set(asked).size > 1 && same > 30 ? one.lastIndexOf(" ", same) + 1 : 0;  // instructions before each question
  for (const [i, group] of [...groups.values()].entries()) {
    const [{step, source, group: id, truth, prompt}] = group, rewards = group.map(r => r.reward).filter(Number.isFinite);
    const columns = Object.keys(OUTCOMES).map(outcome => [outcome, group.filter(r => outcomeOf(r) === outcome)]);
    const made = columns.filter(([, own]) => own.length).map(([outcome, own]) => make("div", {className: "column"},
      make("h3", {textContent: `${OUTCOMES[outcome]} ${outcome} (${own.length})`}), ...own.map(r => {
        const card = {r, head: make("header"), strip: make("canvas", {className: "strip", height: 14})};
        card.rows = make("div", {className: "rows"});
        card.rows.style.minHeight = `${24 * Math.ceil(r.length / 14)}px`;  // until it is drawn
        cards.push(card);
        return card.node = make("article", {card}, card.head, card.strip, card.rows);
      })));
    const about = make("p", {className: "about"}, joined(step && `Step ${step}`, source,
      `${group.length} response${group.length > 1 ? "s" : ""}`, rewards.length && `mean reward ${format(sum(rewards) / rewards.length)}`,
      responses.some(r => r.advantage) && noPush(group)),
      ...(truth === null ? [" · no right answer"] : [" · right answer ", make("bdi", {textContent: visible(truth)})]));
    byId("groups").append(make("section", {className: "group"}, make("details", {className: "prompt"},
      make("summary", {}, make("h2", {textContent: visible((same ? "… " : "") + asked[i].slice(same))})),
      make("pre", {textContent: visible(prompt)}), make("p", {className: "about id", textContent: `group ${visible(id)}`})),
    about, make("div", {className: "columns"}, ...made)));
  }
  cards.forEach(card => watch.observe(card.node));
}

function summarize() {
  const shown = cards.filter(card => !card.node.hidden).map(card => card.r), name = nameNow();
  const scored = shown.filter(r => diagnostics(r, name)), all = scored.map(r => diagnostics(r, name));
  const mean = key => format(sum(all.map(figures => figures[key])) / all.length);
  const number = colourNow().value === logImportance ? "log10 of importance" : elements.colour.selectedOptions[0].text;
  const say = (id, text) => { byId(id).textContent = text; };
  say("histogramTitle", `${number}, reasoning tokens`);
  say("figures", all.length ? `${all.length} responses with weights: mean ESS ratio ${mean("ess")}, mean top-10 % mass ${mean("top")}` : "");
  say("shown", `${shown.length} of ${responses.length} responses`);
  byId("histogram").replaceChildren(histogram(shown, name));
  types(scored, name);
  offer("status", responses.map(r => credit(r, name).status), statusText);
  say("why", shown.length ? whyText(shown, name) : "");
}

const noPush = list => list.some(r => r.advantage) ? "" : list.some(r => r.advantage === 0) ? "all advantages are 0"
  : "no advantages (GRPO needs the rewards of at least two responses to a prompt)";

// Why colours are missing, or not those of the update; "" where all is as usual.
function whyText(shown, name) {
  const colour = elements.colour.value, all = shown.map(r => credit(r, name)), said = [], counts = new Map();
  if (["rank", "importance"].includes(colour) && !shown.some(r => name && scoresOf(r, name).sorted)) {
    return "No colours: no response here has finite importance.";
  }
  if (!["push", "weight"].includes(colour)) return "";
  if (noPush(shown)) said.push(colour === "push" ? `No colours: ${noPush(shown)}. Colour by weight.` : `Coloured by weight: ${noPush(shown)}.`);
  for (const {status} of all) counts.set(status, (counts.get(status) ?? 0) + 1);
  const reasons = [...counts].map(([status, count]) => `${statusText(status)} (${count})`).join(", ");
  if (!all.some(({weights}) => weights)) said.push(`No weights were recorded: ${reasons}.`);
  else if (all.every(({weights}) => weights?.every(x => x === 1) ?? true)) said.push(`All weights are 1, as in plain GRPO: ${reasons}.`);
  return said.join(" ");
}

function types(list, name) {
  const none = [0, 0, 0, 0, 0, 0, 0];  // sum of weights and count in right, wrong and other responses; sum of |weight x advantage|
  const kinds = data.kinds.map(() => ({all: [...none]}));
  for (const r of list) {
    const {weights} = credit(r, name), at = r.right === null ? 4 : r.right ? 0 : 2;
    for (const i of r.reasoning) {
      const kind = kinds[data.tokens.kind[r.token[i]]];
      for (const sums of [kind.all, kind[r.step] ??= [...none]]) {
        sums[at] += weights[i];
        sums[at + 1]++;
        sums[6] += Math.abs(weights[i] * r.advantage);
      }
    }
  }
  const whole = sum(kinds.map(({all}) => all[6])), own = steps.filter(step => list.some(r => r.step === step));
  const columns = own.length > 1 ? own : [], share = all => `${format(Math.round(100 * all[6] / whole))} %`;
  const mean = (sums, at) => sums[at + 1] ? (sums[at] / sums[at + 1]).toFixed(2) : "–";
  const occur = [0, 2, 4].filter(at => kinds.some(({all}) => all[at + 1])), means = sums => occur.map(at => mean(sums, at));
  const graded = occur.join() !== "4", titles = graded ? occur.map(at => Object.keys(OUTCOMES)[at / 2]) : ["mean weight"];
  const count = all => all[1] + all[3] + all[5], line = (tag, texts) => make("tr", {},
    ...texts.map((textContent, i) => make(i ? tag : "th", {textContent})));
  byId("types").replaceChildren(...list.length ? [
    line("th", ["", "tokens", ...titles, ...whole ? ["share"] : [], ...columns.map(step => `step ${step}`)]),
    ...kinds.map(({all, ...of}, i) => line("td", [data.kinds[i], count(all), ...means(all), ...whole ? [share(all)] : [],
      ...columns.map(step => of[step] ? means(of[step]).join(" · ") : "–")]))] : []);
  byId("typesNote").textContent = !list.length ? "no response here has weights to average"
    : (graded ? "mean weight by outcome" : "no response has a reward") + (whole ? "; share of all |weight × advantage|" : "");
  showMore();
  byId("form").textContent = formText(kinds.map(({all}) => [count(all), all[0] + all[2] + all[4], mean(all, 0), mean(all, 2)]), list);
}

// What to think of it if form has the largest mean weight. `kinds`: tokens, sum of weights, mean weights in right and wrong responses.
function formText(kinds, list) {
  const names = {marks: "Marks (“;”, other punctuation, line breaks)", operators: "Operators (“=”, “+”)"};
  const paid = kinds.map(([count, weight]) => weight / count || 0), top = paid.indexOf(Math.max(...paid));
  const [count, , right, wrong] = kinds[top], length = Math.round(sum(list.map(r => r.reasoning.length)) / list.length);
  if (!(data.kinds[top] in names) || count < 20 || !(paid[top] > 1)) return "";
  const noise = length < 200 ? `Part of it can be noise: a response has only ${length} reasoning tokens. ` : "";
  const here = [right, wrong].includes("–") ? "" : ` (here ${right} and ${wrong})`;
  return `${names[data.kinds[top]]} have the largest mean weight: ${paid[top].toFixed(2)}. They often stand where the model commits itself `
    + `to a result, and the answer can depend on that place; this does not mean that they are right. ${noise}`
    + `Their updates cancel in a group if right and wrong responses give them the same weight${here}.`;
}

const showMore = () => { byId("more").hidden = byId("types").offsetWidth <= byId("types").parentNode.clientWidth; };

// ---- the token under the pointer, and the pinned token

function tell(span) {
  const {r} = span.closest("article").card, i = span.place, tip = byId("tip"), lines = [];
  const say = (key, value) => lines.push(make("dt", {textContent: key}), make("dd", {textContent: value}));
  say("token", `id ${data.tokens.id[r.token[i]]}, ${i + 1} of ${r.length}, ${r.segment[i]}`);
  for (const name of names()[0] ? ownOf(r, Object.keys(data.importances)) : [""]) {
    const {weights} = credit(r, name), place = name && rank(r, name, i), value = name && r.importance[name][i];
    if (name) say(visible(name), place ? `${value.toPrecision(4)}, rank ${place} of ${r.reasoning.length}` : "not scored");
    const push = r.advantage === null ? "" : `, × advantage ${signed(weights?.[i] * r.advantage)}`;
    if (weights && !ofTool(r, i)) say("weight", weights[i].toFixed(3) + push);
  }
  if (r.logProb[i] <= 0) say("log-prob", `${format(r.logProb[i])}, probability ${format(Math.exp(r.logProb[i]))}`);
  if (r.entropy[i] >= 0) say("entropy", `${format(r.entropy[i])} nats`);
  tip.replaceChildren(make("bdi", {textContent: shownText(textOf(r, i))}), make("dl", {}, ...lines));
  tip.style.display = "block";
  return put(tip, span);
}

// Beside the response, at the height of the token; where there is no room, at the edge that is further away. Controls and legend,
// to the left and above, stay visible. Returns whether the token does.
function put(tip, span) {
  const [line] = span.getClientRects(), card = span.closest("article").getBoundingClientRect();
  const [main, legend] = [byId("legend").parentNode, byId("legend")].map(node => node.getBoundingClientRect());
  const {offsetWidth: wide, offsetHeight: high} = tip, left = card.left - wide - 6, first = legend.bottom + 4, last = innerHeight - high - 4;
  const beside = left >= main.left || card.right + wide + 10 <= document.documentElement.clientWidth;
  const above = first + high < line.top, below = line.bottom < last, far = above && (!below || line.top > innerHeight / 2) ? first : last;
  tip.style.left = `${!beside ? main.left : left >= main.left ? left : card.right + 6}px`;
  tip.style.top = `${beside ? Math.max(first, Math.min(line.top - 8, last)) : Math.max(first, far)}px`;
  return beside || above || below;
}

const mark = (card, i, className, on) => card.shown?.forEach(({spans}) => spans[i].classList.toggle(className, on));
const pinned = () => pin.card.shown[pin.row].spans[pin.i];

function unpin() {
  if (pin) mark(pin.card, pin.i, "pinned", false);
  if (pin?.card.shown && !pin.card.near) clear(pin.card);
  pin = null;
  byId("tip").style.display = "none";
}

function pinAt(card, place, block = "nearest", row = 0) {
  const i = Math.max(0, Math.min(place, card.r.length - 1));
  unpin();
  if (!card.r.length) return;
  if (!card.shown) paint(card);
  pin = {card, i, row};
  mark(card, i, "pinned", true);
  pinned().scrollIntoView({block});
  if (tell(pinned())) return;
  pinned().scrollIntoView({block: "center"});
  tell(pinned());
}

function movePin(by, boosted) {
  const {card, row} = pin, {weights} = credit(card.r, card.shown[row].name);
  let i = pin.i + by;
  while (boosted && i in card.r.token && !(weights?.[i] > 1)) i += by;
  if (i in card.r.token) pinAt(card, i, "nearest", row);
}

// ---- controls

function update(name) {
  const gate = elements.gate, numbers = ["tau", "beta", "floor"];
  if (numbers.includes(name) && gate.value === "run") gate.value = data.run.gate;
  const other = gate.value !== data.run.gate && data.gates[gate.value];
  if (name === "gate") elements.tau.value = (other || data.run).tau;
  for (const key of numbers) {
    if (name === "gate" && gate.value === "run") elements[key].value = data.run[key];
    elements[key].disabled = !settingsOf(gateNow().gate).includes(key);
    elements[key].previousElementSibling.textContent = format(+elements[key].value);
  }
  elements.step.previousElementSibling.textContent = +elements.step.value ? steps[elements.step.value - 1] : "all";
  if (name === "gate" || numbers.includes(name)) for (const r of responses) r.credit = {__proto__: null};
  if (name === "importance") {
    unpin();
    cards.filter(card => card.shown).forEach(clear);
  }
  for (const card of cards) card.node.hidden = !passes(card.r);
  for (const node of document.querySelectorAll(".column, .group")) node.hidden = !node.querySelector("article:not([hidden])");
  for (const card of cards) if (card.near && !card.node.hidden) paint(card);
  if (pin?.card.node.hidden) unpin(); else if (pin) tell(pinned());
  for (const node of document.querySelectorAll("[data-colour]")) node.hidden = node.dataset.colour !== elements.colour.value;
  clearTimeout(waiting);
  waiting = setTimeout(summarize, 100);
}

function goTo(by) {
  const shown = cards.filter(card => !card.node.hidden), at = shown.findIndex(({node}) => node.contains(document.activeElement));
  const next = shown[at < 0 ? shown.findIndex(({node}) => node.getBoundingClientRect().bottom > 160) : at + by];
  if (!next) return;
  if (!next.shown) paint(next);
  next.node.scrollIntoView();
  next.rows.querySelector(".tokens").focus({preventScroll: true});
}

function listen() {
  const tokenOf = target => target.closest?.("#groups .t");
  const stepBy = by => { elements.step.value = +elements.step.value + by; update("step"); };
  const keys = {"/": () => elements.search.focus(), "?": () => byId("help").togglePopover(), Escape: unpin,
    j: () => goTo(1), k: () => goTo(-1), "[": () => stepBy(-1), "]": () => stepBy(1)};
  document.addEventListener("mouseover", ({target}) => {
    if (!pin && tokenOf(target)) tell(tokenOf(target)); else if (!pin) byId("tip").style.display = "none";
  });
  byId("groups").addEventListener("click", ({target, offsetX}) => {
    const card = target.closest("article")?.card, span = tokenOf(target);
    if (target.className === "strip") pinAt(card, Math.floor(offsetX / target.clientWidth * card.r.length), "center");
    else if (!span || (pin?.card === card && pin.i === span.place)) target.matches("button") || unpin();
    else pinAt(card, span.place, "nearest", card.shown.findIndex(({name}) => name === span.name));
  });
  document.addEventListener("keydown", event => {
    const card = document.activeElement.closest("article")?.card, by = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    const typing = event.key !== "Escape" && event.target.matches("[type=search]"), {ctrlKey, metaKey, altKey} = event;
    if (typing || ctrlKey || metaKey || altKey) return;
    if (pin && by && !event.target.matches("input, select")) movePin(by, event.shiftKey);
    else if (event.key === "Enter" && event.target.matches(".tokens")) pinAt(card, 0);
    else if (event.key in keys) keys[event.key]();
    else return;
    if (event.key !== "Escape") event.preventDefault();  // the browser closes the list of keys with it
  });
  addEventListener("scroll", () => pin && tell(pinned()));
  addEventListener("resize", () => { cards.filter(card => card.near).forEach(strip); showMore(); });
  form.onsubmit = () => false;
  form.oninput = ({target}) => update(target.name);
}

load().then(() => {
  setUp();
  build();
  listen();
  update();
  byId("side").open = !matchMedia("(max-width: 900px)").matches;
  requestAnimationFrame(() => { document.body.dataset.ready = ""; });
}).catch(error => { byId("groups").textContent = `This page cannot be shown: ${error}`; });
