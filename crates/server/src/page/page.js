"use strict";
// The playground: documents, a question, and methods side by side. It speaks to the same routes as any client.

const $ = (id) => document.getElementById(id);
const make = (tag, more = {}, ...children) => {
  const node = Object.assign(document.createElement(tag), more);
  node.append(...children);
  return node;
};
const headers = () => {
  const key = $("key").value.trim();
  return { "content-type": "application/json", ...(key && { authorization: `Bearer ${key}` }) };
};
const bytes = (n) => n < 1 << 20 ? `${(n / 1024).toFixed(1)} KiB` : n < 1 << 30 ? `${(n / (1 << 20)).toFixed(1)} MiB` : `${(n / (1 << 30)).toFixed(2)} GiB`;
const seconds = (s) => s < 1 ? `${(s * 1000).toFixed(0)} ms` : `${s.toFixed(2)} s`;

async function request(path, options = {}) {
  const response = await fetch(path, { ...options, headers: headers() });
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  if (response.status === 401) $("access").open = true;
  throw new Error(body?.error?.message ?? `${response.status} ${response.statusText}`);
}

/// The data of server-sent events.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
      if (data && data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

const tell = (error) => { $("problem").textContent = error?.name === "AbortError" ? "" : error?.message ?? error ?? ""; };

async function showDocuments() {
  const { data, has_more: more } = await (await request("v1/documents?limit=500")).json();
  const ticked = new Set(chosen());
  const item = (kept) => {
    const tick = make("input", { type: "checkbox", value: kept.id, checked: ticked.has(kept.id) });
    const name = make("label", {}, tick, ` ${kept.title} `, make("small", { textContent: `${kept.tokens} tokens` }));
    const pin = make("button", { type: "button", className: "quiet", textContent: kept.pinned ? "unpin" : "pin" });
    pin.ariaLabel = `${pin.textContent} ${kept.title}`;
    pin.onclick = () => change(`v1/documents/${kept.id}/pin`, { method: "POST", body: JSON.stringify({ pinned: !kept.pinned }) });
    const gone = make("button", { type: "button", className: "quiet", textContent: "remove" });
    gone.ariaLabel = `remove ${kept.title}`;
    gone.onclick = () => change(`v1/documents/${kept.id}`, { method: "DELETE" });
    return make("li", {}, name, pin, gone);
  };
  const last = data.length === 0 ? [make("li", { textContent: "None yet: add a text below." })] : more ? [make("li", { textContent: "… and more" })] : [];
  $("documents").replaceChildren(...data.map(item), ...last);
}

const chosen = () => [...$("documents").querySelectorAll("input:checked")].map((tick) => tick.value);

async function change(path, options) {
  try {
    await request(path, options);
    await showDocuments();
  } catch (error) { tell(error); }
}

async function add(documents) {
  const bar = $("progress");
  bar.hidden = false;
  bar.removeAttribute("value");
  try {
    const response = await request("v1/documents", { method: "POST", body: JSON.stringify({ documents, stream: true }) });
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      if (event.object === "document.progress") [bar.max, bar.value] = [event.total || 1, event.done];
    }
    await showDocuments();
    return true;
  } catch (error) {
    tell(error);
    return false;
  } finally {
    bar.hidden = true;
  }
}

$("add").onsubmit = async (event) => {
  event.preventDefault();
  tell();
  if (await add([{ title: $("title").value, text: $("text").value }])) $("add").reset();
};
$("files").onchange = async () => {
  tell();
  const read = async (file) => ({ title: file.name, text: await file.text() });
  const documents = await Promise.all([...$("files").files].map(read));
  if (documents.length) await add(documents);
  $("files").value = "";
};

/// One method's answer: its text as it comes, then what it took.
class Answer {
  constructor(method) {
    this.method = method;
    this.text = make("p", { className: "text" });
    this.text.setAttribute("aria-live", "polite");
    this.bars = make("dl", { className: "bars" });
    this.strip = make("canvas", { width: 600, height: 36 });
    this.strip.setAttribute("role", "img");
    this.held = make("p", { className: "strip" });
    this.sources = make("div");
    this.kept = [];
    this.node = make("article", {}, make("h3", { textContent: method }), this.text, this.bars, this.held, this.strip, this.sources);
  }

  async run(body, signal) {
    const options = { method: "POST", body: JSON.stringify(body), signal };
    for await (const event of events(await request("v1/chat/completions", options))) {
      if (event.error) throw new Error(event.error.message);
      this.text.append(event.choices[0]?.delta?.content ?? "");
      if (event.refrain?.retained) this.hold(event.refrain);
      if (event.refrain?.stats) this.stats = event.refrain;
    }
    this.show();
  }

  /// The live strip: a column a token, as high as the cache is full.
  hold({ retained, kv_bytes: size }) {
    this.kept.push(retained);
    this.held.textContent = `KV cache: ${retained} tokens held, ${bytes(size)}`;
    this.strip.setAttribute("aria-label", this.held.textContent);
    const [paint, most] = [this.strip.getContext("2d"), Math.max(...this.kept)];
    const { width, height } = this.strip;
    paint.clearRect(0, 0, width, height);
    paint.fillStyle = getComputedStyle(document.body).getPropertyValue("--key");
    const step = width / Math.max(64, this.kept.length);
    this.kept.forEach((n, i) => paint.fillRect(i * step, height - n / most * height, Math.max(1, step - .5), n / most * height));
  }

  show() {
    const { stats, explanation } = this.stats ?? {};
    if (!stats) return;
    for (const part of explanation?.chunks ?? []) {
      const most = Math.max(...part.shares, 1e-9);
      const words = part.tokens.map((text, i) => {
        const word = make("span", { textContent: text, title: `${(100 * part.shares[i]).toFixed(2)} % of the question's attention${part.recomputed[i] ? ", recomputed" : ""}` });
        word.style.setProperty("--a", (.6 * Math.sqrt(part.shares[i] / most)).toFixed(2));
        if (part.recomputed[i]) word.className = "again";
        return word;
      });
      this.sources.append(make("details", { className: "source" }, make("summary", { textContent: part.label }), make("p", { className: "shaded" }, ...words)));
    }
    if (explanation) this.sources.prepend(make("p", { className: "strip", textContent: "More shade: more of the question's attention. Underlined: recomputed." }));
  }
}

/// Bars of all answers, to one scale.
function compare(answers) {
  const done = answers.filter((answer) => answer.stats);
  const rows = [
    ["Time to first token", (a) => a.ttft, seconds],
    ["Tokens recomputed", (a) => a.recomputed_tokens, String],
    ["Prompt tokens cached", (a) => a.cached_tokens, String],
    ["KV bytes held", (a) => a.kv_bytes_held, bytes],
    ["Time a token", (a) => a.tpot ?? 0, seconds],
  ];
  for (const answer of done) {
    const cells = rows.flatMap(([name, of, say]) => {
      const [own, most] = [of(answer.stats.stats), Math.max(...done.map((other) => of(other.stats.stats)), 1e-9)];
      const bar = make("i");
      bar.style.width = `${100 * own / most}%`;
      return [make("dt", { textContent: name }), make("div", { className: "bar" }, bar), make("dd", { textContent: say(own) })];
    });
    answer.bars.replaceChildren(...cells);
  }
}

let stop = null;
$("stop").onclick = () => stop?.abort();
$("ask").onsubmit = async (event) => {
  event.preventDefault();
  tell();
  const methods = [...$("methods").querySelectorAll("input:checked")].map((tick) => tick.value);
  if (methods.length === 0) return tell("Choose a method.");
  const from = new FormData($("ask")).get("from");
  const documents = { search: "search", chosen: chosen().map((id) => ({ id })), none: [] }[from];
  if (from === "chosen" && documents.length === 0) return tell("Tick a document, or let a search find some.");
  const evict = $("evict").value;
  const policy = evict === "full" ? evict : { name: evict, capacity: Number($("capacity").value) };
  const answers = methods.map((method) => new Answer(method));
  $("answers").replaceChildren(...answers.map((answer) => answer.node));
  stop = new AbortController();
  [$("go").disabled, $("stop").disabled] = [true, false];
  try {
    // One after the other: side by side they would slow each other down.
    for (const answer of answers) {
      await answer.run({
        messages: [{ role: "user", content: $("question").value }], documents, stream: true,
        max_tokens: Number($("tokens").value), refrain: { method: answer.method, evict: policy, explain: "tokens" },
      }, stop.signal);
      compare(answers);
    }
  } catch (error) {
    tell(error);
  } finally {
    [$("go").disabled, $("stop").disabled] = [false, true];
  }
};
$("question").onkeydown = (event) => {
  if (event.key === "Enter" && !event.shiftKey) {
    event.preventDefault();
    $("ask").requestSubmit();
  }
};

async function start() {
  const { methods, policies, default_method: own, default_evict: policy } = await (await request("v1/methods")).json();
  const base = own.split(":")[0];
  const tick = ({ name, description }) => make("label", { title: description },
    make("input", { type: "checkbox", value: name === base ? own : name, checked: ["vanilla", base].includes(name) }), ` ${name}`);
  $("methods").append(...methods.map(tick));
  $("evict").append(...policies.map(({ name, description }) => make("option", { value: name, textContent: name, title: description })));
  $("evict").value = policy.split(":")[0];
  $("capacity").value = policy.match(/capacity=(\d+)/)?.[1] ?? 512;
  bounds();
  const { data: [model] } = await (await request("v1/models")).json();
  $("model").textContent = `${model.id}, context of ${model.max_model_len} tokens; ${model.refrain.method} (${model.refrain.method_reason})`;
  await showDocuments();
}
const bounds = () => { $("capacity").disabled = $("evict").value === "full"; };
$("evict").onchange = bounds;
$("access-form").onsubmit = (event) => event.preventDefault();
const begin = () => { tell(); start().catch(tell); };
$("key").onchange = () => { $("methods").querySelectorAll("label").forEach((label) => label.remove()); $("evict").replaceChildren(); begin(); };
begin();
