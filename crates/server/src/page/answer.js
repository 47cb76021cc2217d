// One method's answer: its text as it comes, where the keys and values of its prompt came from, and what it took.

import { bytes, count, events, make, request, seconds } from "./common.js";

/// Kinds of tokens of a prompt, in the order of a bar: class and name.
const KINDS = [["prefix", "Exact prefix"], ["reused", "Reused"], ["recomputed", "Recomputed"], ["fresh", "Computed"], ["left", "Left out"]];

/// Tokens of a prompt by kind; each counts once.
function account({ prompt_tokens: all, document_tokens: documents, prefix_tokens: prefix, cached_tokens: cached, recomputed_tokens: again, kept_tokens: kept }) {
  const read = cached - prefix;
  // What was computed although no chunk was read was not computed again.
  const recomputed = read ? again : 0;
  // A method that reads a part of the documents leaves the rest out.
  const left = read && read < documents ? all - kept : 0;
  // Some methods read at one layer what they recompute at another.
  const reused = prefix + read + recomputed + left > all ? Math.max(0, read - recomputed) : read;
  return { prefix, reused, recomputed, fresh: all - prefix - reused - recomputed - left, left };
}

/// The documents of an answer, as a further request names them.
const references = (documents) => documents.map(({ id, chunks }) => ({ id, parts: chunks.map(({ part }) => part) }));

/// The documents of an answer in words.
const inWords = (documents) => documents.map(({ title, chunks }) =>
  chunks.length === chunks[0]?.of ? title : `${title} (${count(chunks.length, "part")} of ${chunks[0].of})`).join(", ");

export class Answer {
  constructor(method, note) {
    this.method = method;
    this.said = "";
    this.text = make("p", { className: "text" });
    this.text.setAttribute("aria-live", "polite");
    this.note = make("p", { className: "hint", textContent: note });
    this.details = make("div");
    this.kept = [];
    this.node = make("article", {}, make("h4", { textContent: method }), this.note, this.text, this.details);
    this.node.ariaLabel = `Answer by ${method}`;
  }

  /// Asks for the answer; `same` says that its documents are those of the answer before.
  async run(body, same, signal) {
    [this.bounded, this.same] = [body.refrain.evict !== "full", same];
    // Read out when it is whole, not word by word.
    this.text.ariaBusy = "true";
    try {
      const options = { method: "POST", body: JSON.stringify(body), signal };
      for await (const event of events(await request("v1/chat/completions", options))) {
        if (event.error) throw new Error(event.error.message);
        this.say(event.choices[0]?.delta?.content ?? "");
        if (event.refrain?.retained) this.kept.push(event.refrain.retained);
        if (event.refrain?.stats) this.result = event.refrain;
      }
    } catch (error) {
      this.note.append(error.name === "AbortError" ? " Stopped." : ` No ${this.said ? "more of the " : ""}answer: ${error.message}`);
      throw error;
    } finally {
      this.text.ariaBusy = "false";
    }
    this.show();
  }

  say(text) {
    this.said += text;
    this.text.append(text);
  }

  get stats() { return this.result?.stats; }

  get documents() { return this.result && references(this.result.documents); }

  show() {
    if (!this.stats) return;
    const { documents, explanation } = this.result;
    this.times = make("dl", { className: "numbers" });
    this.details.replaceChildren(...this.prompt(), this.times, ...(this.bounded ? this.strip() : []));
    if (explanation) this.details.append(...shaded(explanation.chunks));
    else if (documents.length) this.details.append(make("p", { className: "hint", textContent: `From ${this.same ? "the same documents" : inWords(documents)}.` }));
  }

  /// The prompt as a bar, and the numbers that it shows.
  prompt() {
    const tokens = account(this.stats);
    const there = KINDS.filter(([kind]) => tokens[kind] > 0);
    const share = (kind) => { const percent = Math.round(100 * tokens[kind] / this.stats.prompt_tokens); return `${percent || "<1"} %`; };
    const bar = make("div", { className: "stack" }, ...there.map(([kind]) => {
      const part = make("i", { className: kind });
      part.style.flexGrow = tokens[kind];
      return part;
    }));
    bar.setAttribute("role", "img");
    bar.ariaLabel = `Prompt of ${count(this.stats.prompt_tokens, "token")}: ${there.map(([kind, name]) => `${name.toLowerCase()} ${tokens[kind]}`).join(", ")}`;
    const rows = there.map(([kind, name]) => make("div", {},
      make("dt", {}, make("i", { className: `swatch ${kind}` }), ` ${name}`), make("dd", {}, `${tokens[kind]} `, make("small", { textContent: share(kind) }))));
    return [make("p", { className: "hint", textContent: `Prompt of ${count(this.stats.prompt_tokens, "token")}` }), bar, make("dl", { className: "numbers kinds" }, ...rows)];
  }

  /// How full the cache was: a column a token of the answer.
  strip() {
    const strip = make("canvas", { width: 600, height: 36 });
    strip.setAttribute("role", "img");
    strip.ariaLabel = `The cache held ${this.kept[0]} tokens after the first token of the answer, ${this.kept.at(-1)} after the last`;
    const [paint, most] = [strip.getContext("2d"), Math.max(...this.kept)];
    paint.fillStyle = getComputedStyle(document.body).getPropertyValue("--key");
    const step = strip.width / Math.max(64, this.kept.length);
    this.kept.forEach((n, i) => paint.fillRect(i * step, strip.height * (1 - n / most), Math.max(1, step - .5), strip.height * n / most));
    return [make("p", { className: "hint", textContent: `Tokens in the cache, token by token: ${this.kept.at(-1)} at the end` }), strip];
  }
}

/// The documents, each token shaded by its share of the question's attention.
function shaded(chunks = []) {
  const key = make("p", { className: "hint", textContent: "More shade: more of the question’s attention. Underlined: recomputed." });
  const sources = chunks.map(({ label, tokens, shares, recomputed }) => {
    const most = Math.max(...shares, 1e-9);
    const words = tokens.map((text, i) => {
      const word = make("span", { textContent: text, title: `${(100 * shares[i]).toFixed(2)} % of the question’s attention${recomputed[i] ? ", recomputed" : ""}` });
      word.style.setProperty("--a", (.6 * Math.sqrt(shares[i] / most)).toFixed(2));
      if (recomputed[i]) word.className = "again";
      return word;
    });
    return make("details", { className: "source" }, make("summary", { textContent: label }), make("p", { className: "shaded" }, ...words));
  });
  return sources.length ? [key, ...sources] : [];
}

const TIMES = [
  ["First token after", (stats) => stats.ttft, seconds],
  ["Each further token", (stats) => stats.tpot ?? 0, seconds],
  ["KV cache held", (stats) => stats.kv_bytes_held, bytes],
];

/// Times and bytes of a turn's answers, with bars to one scale where there are several.
export function compare(answers) {
  const done = answers.filter((answer) => answer.stats);
  for (const answer of done) {
    answer.times.replaceChildren(...TIMES.map(([name, of, say]) => {
      const own = of(answer.stats);
      const value = make("dd", {}, make("span", { textContent: own ? say(own) : "–" }));
      if (done.length > 1) {
        const bar = make("i");
        bar.style.width = `${100 * own / Math.max(...done.map((other) => of(other.stats)), 1e-9)}%`;
        value.prepend(make("span", { className: "bar" }, bar));
      }
      return make("div", {}, make("dt", { textContent: name }), value);
    }));
  }
}

/// What an answer took, in a sentence.
export const summary = ({ method, stats }) => {
  const { prefix, reused, recomputed, fresh } = account(stats);
  return `${method}: first token after ${seconds(stats.ttft)}; of ${count(stats.prompt_tokens, "prompt token")}, ${prefix} exact prefix, ${reused} reused, ${recomputed} recomputed, ${fresh} computed.`;
};
