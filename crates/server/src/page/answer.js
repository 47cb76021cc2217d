// One method's answer: its text as it comes, where the keys and values of its prompt came from, and what it took.

import { $, bytes, count, events, fault, make, request, seconds } from "./common.js";
import { render } from "./markdown.js";

/// Kinds of tokens of a prompt, in the order of a bar: class and name.
const KINDS = [["prefix", "Exact prefix"], ["reused", "Reused"], ["recomputed", "Recomputed"], ["fresh", "Computed"], ["left", "Left out"]];

/// Tokens of a prompt by kind; each counts once.
function account({ prompt_tokens: all, prefix_tokens: prefix, cached_tokens: cached, reused_tokens: reused, recomputed_tokens: again, left_out_tokens: left }) {
  // What was computed although no chunk was read was not computed again.
  const recomputed = cached > prefix ? again : 0;
  return { prefix, reused, recomputed, fresh: all - prefix - reused - recomputed - left, left };
}

/// The documents of an answer, as a further request names them.
const references = (documents) => documents.map(({ id, chunks }) => ({ id, parts: chunks.map(({ part }) => part) }));

/// The documents of an answer in words.
const inWords = (documents) => documents.flatMap(({ title, chunks }, i) =>
  [i ? ", " : "", make("bdi", { textContent: title }), chunks.length === chunks[0]?.of ? "" : ` (${count(chunks.length, "part")} of ${chunks[0].of})`]);

/// Copies a text, also where the page was not loaded safely and the browser has no clipboard for it. Fails if the browser does not copy.
async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const field = make("textarea", { value: text });
  document.body.append(field);
  field.select();
  const isCopied = document.execCommand("copy");
  field.remove();
  if (!isCopied) throw new Error("the browser does not copy");
}

export class Answer {
  /// `note` says what the answer goes on from.
  constructor(method, note) {
    Object.assign(this, { method, note, said: "", end: "", kept: [] });
    this.text = make("div", { className: "text" });
    this.text.setAttribute("aria-live", "polite");
    this.last = make("p", { className: "hint" });
    this.details = make("div");
    this.copy = make("button", { type: "button", className: "quiet", textContent: "Copy", hidden: true, ariaLabel: `Copy the answer by ${method}` });
    this.copy.onclick = async () => {
      const outcome = await copy(this.said).then(() => "Copied", () => "Not copied: select the text");
      this.copy.focus();
      this.copy.textContent = $("told").textContent = outcome;
      setTimeout(() => { this.copy.textContent = "Copy"; }, 2000);
    };
    const head = make("div", { className: "row head" }, make("h4", { textContent: method }), this.copy);
    this.node = make("article", {}, head, make("p", { className: "hint", textContent: note }), this.text, this.last, this.details);
    this.node.ariaLabel = `Answer by ${method}`;
  }

  /// An answer as it was shown before the page was loaded anew.
  static of(saved) {
    const answer = Object.assign(new Answer(saved.method, saved.note), saved);
    answer.say("");
    answer.finish(answer.end || (answer.result ? "" : answer.asked ? "Stopped." : "Not asked."));
    answer.show();
    return answer;
  }

  toJSON() {
    const { method, note, said, end, kept, result, asked, same, bounded } = this;
    return { method, note, said, end, kept, result, asked, same, bounded };
  }

  /// Asks for the answer; `same` says that its documents are those of the answer before, and `grown` is called when there is more of it.
  async run(body, same, signal, grown) {
    Object.assign(this, { asked: body.documents, bounded: body.refrain.evict !== "full", same });
    // Read out when it is whole, not word by word.
    this.text.ariaBusy = "true";
    try {
      const options = { method: "POST", body: JSON.stringify(body), signal };
      for await (const event of events(await request("v1/chat/completions", options))) {
        if (event.error) throw fault(event.error);
        const [choice] = event.choices ?? [];
        if (choice?.delta?.content) this.say(choice.delta.content);
        if (choice?.finish_reason === "length") this.finish(`Cut off at ${count(body.max_tokens, "token")}, as many as “At most” allows.`);
        if (event.refrain?.retained) this.kept.push(event.refrain.retained);
        if (event.refrain?.stats) this.result = event.refrain;
        grown();
      }
      if (!this.said && !this.end) this.finish("The model ended its answer at once, without text.");
    } catch (error) {
      // A page that is left loses its connections first: it is gone before it would blame the server.
      if (error.lost) await new Promise((resume) => setTimeout(resume, 1000));
      if (error.code === "not_found") {
        const [which, then] = same ? ["of the earlier turns ", "choose others under “From”"] : ["", "look at “From”, and ask again"];
        error.message = `A document ${which}was removed: ${then}.`;
      }
      this.finish(error.name === "AbortError" ? "Stopped." : `No ${this.said ? "more of the " : ""}answer: ${error.message}`);
      throw error;
    } finally {
      this.text.ariaBusy = "false";
    }
    this.show();
  }

  say(text) {
    this.said += text;
    render(this.text, this.said);
    this.copy.hidden = !this.said;
  }

  /// Says below the text how it ended, unless by itself.
  finish(end) { this.last.textContent = this.end = end; }

  get stats() { return this.result?.stats; }

  /// The documents that a further request names: those of the answer, or those that it was asked from if it was not finished.
  get documents() { return this.result ? references(this.result.documents) : this.asked ?? []; }

  /// Whether it had documents, as far as is known.
  get hasDocuments() { return Array.isArray(this.documents) && this.documents.length > 0; }

  /// Leaves out a document that is no longer there.
  forget(id) {
    const others = (documents) => documents.filter((document) => document.id !== id);
    if (Array.isArray(this.asked)) this.asked = others(this.asked);
    if (this.result) this.result.documents = others(this.result.documents);
  }

  show() {
    if (!this.stats) return;
    const { documents, explanation } = this.result;
    this.times = make("dl", { className: "numbers" });
    this.details.replaceChildren(...this.prompt(), this.times, ...(this.bounded && this.kept.length ? this.strip() : []));
    const hint = (...said) => this.details.append(make("p", { className: "hint" }, ...said));
    if (documents.length === 0 && this.asked === "search") hint("No document was found: answered by the model alone.");
    else if (explanation) this.details.append(...shaded(explanation.chunks));
    else if (documents.length) hint("From ", ...(this.same ? ["the same documents"] : inWords(documents)), ".");
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
    return [make("p", { className: "hint", textContent: `Tokens in the cache, the newest one among them: ${this.kept.at(-1)} at the end` }), strip];
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
    return make("details", { className: "source" }, make("summary", { dir: "auto", textContent: label }), make("p", { className: "shaded" }, ...words));
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
export const summary = ({ method, stats, end }) => {
  const { prefix, reused, recomputed, fresh } = account(stats);
  return `${method}: first token after ${seconds(stats.ttft)}; of ${count(stats.prompt_tokens, "prompt token")}, ${prefix} exact prefix, ${reused} reused, ${recomputed} recomputed, ${fresh} computed.${end && ` ${end}`}`;
};
