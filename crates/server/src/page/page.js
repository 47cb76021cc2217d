// The playground: documents, and a conversation in which methods answer side by side. It speaks to the same routes as any client.

import { $, choose, complain, make, read, tell } from "./common.js";
import { isAnswering, restore, submit, turns } from "./conversation.js";
import { chosen, clear, showDocuments, tick } from "./documents.js";
import { limit, wouldLose } from "./files.js";

/// What the tab had before the page was loaded anew: its session keeps it, and no one else.
const KEPT = "refrain";
/// Fields of what is not yet asked or added.
const DRAFTS = ["question", "title", "text"];
/// Fields of the settings, once the server has said what there is to choose from.
const CHOICES = ["evict", "capacity", "tokens"];

const recall = () => {
  try { return JSON.parse(sessionStorage.getItem(KEPT)); } catch { return null; }
};
const kept = { made: {}, ...recall() };

const values = (ids) => Object.fromEntries(ids.map((id) => [id, $(id).value]));
const put = (values = {}) => { for (const [id, value] of Object.entries(values)) $(id).value = value; };
const ticks = () => [...$("methods").querySelectorAll("input:checked")].map((tick) => tick.value);

/// Whether there are methods to choose from, and whether the documents are listed.
const hasMethods = () => $("methods").querySelector("input") !== null;
let isListed = false;
/// The settings of the next answers, as they are kept: those kept before, until the server has told its methods and documents.
const made = () => ({
  ...kept.made,
  ...(hasMethods() && { fields: values(CHOICES), methods: ticks() }),
  ...(isListed && { from: $("settings").elements.from.value, documents: chosen() }),
});

/// Keeps what is there. Where it is more than the session holds, explanations go first, and the turns next.
function keep() {
  const plain = (key, value) => key === "explanation" ? undefined : value;
  for (const [state, without] of [[{ turns }], [{ turns }, plain], [{}]]) {
    try { return sessionStorage.setItem(KEPT, JSON.stringify({ drafts: values(DRAFTS), made: made(), ...state }, without)); } catch { /* The next has less. */ }
  }
}
window.addEventListener("pagehide", keep);
document.addEventListener("visibilitychange", () => { if (document.hidden) keep(); });
window.addEventListener("beforeunload", (event) => { if (isAnswering() || wouldLose()) event.preventDefault(); });

/// The server's own eviction policy: its text, its name and its capacity.
let own = {};
/// The policy of the next answers: the server's own with all of its options, or one of which the form says name and capacity.
function policy() {
  const [name, capacity] = [$("evict").value, Number($("capacity").value)];
  if (name === own.name && (name === "full" || capacity === own.capacity)) return own.text;
  return name === "full" ? name : { name, capacity };
}

/// Capacities of the policies as the server offers them, its own policy's among them, and the policy that was chosen last.
const usual = new Map();
let chosenPolicy = "";
/// Puts the capacity of a policy that is chosen into its field, unless another number stands there than the one before had.
function followPolicy() {
  if (Number($("capacity").value) === usual.get(chosenPolicy)) $("capacity").value = usual.get($("evict").value);
  chosenPolicy = $("evict").value;
}
$("evict").onchange = followPolicy;

/// The settings of the next answers; none where one is missing.
function settings() {
  const methods = ticks();
  if (methods.length === 0) return tell("Choose a method.");
  const from = $("settings").elements.from.value;
  const documents = { search: "search", chosen: chosen().map((id) => ({ id })) }[from] ?? [];
  if (from === "chosen" && documents.length === 0) return tell("Tick a document, or let a search find some.");
  return { methods, from, documents, evict: policy(), tokens: Number($("tokens").value) };
}

$("ask").onsubmit = async (event) => {
  event.preventDefault();
  if (!hasMethods()) await begin();
  if (!hasMethods()) return;
  // What is wrong can be shown only where it is not folded away.
  if (!$("settings").checkValidity()) $("next").open = true;
  const chosen = $("settings").reportValidity() && settings();
  if (!chosen) return;
  const failed = await submit(chosen);
  // Another window may have removed a document.
  if (failed.some(({ code }) => code === "not_found")) await look();
  keep();
};
$("settings").onsubmit = (event) => {
  event.preventDefault();
  $("question").focus();
};

/// Says what is chosen, and what the methods do.
function describe() {
  $("capacity").disabled = $("evict").value === "full";
  const from = $("settings").querySelector("input[name=from]:checked").parentElement.textContent.trim();
  const methods = [...$("methods").querySelectorAll("label:has(:checked)")];
  $("chosen").textContent = `from ${from}, by ${methods.map((label) => label.textContent.trim()).join(", ") || "no method"}`;
  $("explained").replaceChildren(...methods.flatMap((label) => [make("dt", { textContent: label.textContent }), make("dd", { textContent: label.title })]));
}
$("settings").onchange = describe;

/// Asks the server for its methods, policies and documents, and offers them.
async function offer(options) {
  const { methods, policies, default_method: method, default_evict: text } = await read("v1/methods", options);
  const { data: [model] } = await read("v1/models", options);
  const base = method.split(":")[0];
  const box = ({ name, description }) => {
    const value = name === base ? method : name;
    const checked = kept.made.methods?.includes(value) ?? ["vanilla", base].includes(name);
    return make("label", { title: description }, make("input", { type: "checkbox", value, checked }), ` ${name}`);
  };
  $("methods").append(...methods.map(box));
  $("evict").append(...policies.map(({ name, description }) => make("option", { value: name, textContent: name, title: description })));
  const name = text.split(":")[0];
  for (const policy of policies) usual.set(policy.name, policy.options.find((option) => option.name === "capacity")?.default ?? 512);
  // The text leaves out options that have their defaults.
  own = { text, name, capacity: Number(text.match(/[:,]capacity=(\d+)/)?.[1] ?? usual.get(name)) };
  usual.set(name, own.capacity);
  // The prompt needs most of a short context.
  const fields = { evict: name, capacity: own.capacity, tokens: Math.min(512, model.max_model_len >> 2) };
  put({ ...fields, ...kept.made.fields });
  // Another server may have other policies.
  if (!$("evict").value) put(fields);
  chosenPolicy = $("evict").value;
  $("tokens").max = model.max_model_len;
  limit(model.refrain.max_body_bytes);
  $("model").textContent = `${model.id}, context of ${model.max_model_len} tokens; ${model.refrain.method} (${model.refrain.method_reason})`;
}

async function start(options) {
  if (!hasMethods()) await offer(options);
  await showDocuments(options);
  await tick(kept.made.documents ?? [], options);
  choose(kept.made.from ?? $("settings").elements.from.value);
  isListed = true;
}

/// The controller that ends the requests of the start under way: one begun later has another key.
let starting = new AbortController();
/// Begins, also again where the server did not answer. The options are those of `request`.
async function begin(options) {
  starting.abort();
  starting = new AbortController();
  const { signal } = starting;
  tell();
  await start({ ...options, signal }).catch((error) => { if (!signal.aborted) tell(error); });
}

/// Lists the documents anew, without being asked to: another window, or another program, may have changed them.
const look = () => isListed ? showDocuments({ inBackground: true }).catch(() => {}) : begin({ inBackground: true });
document.addEventListener("visibilitychange", () => { if (!document.hidden) look(); });
// A window beside others is never hidden.
window.addEventListener("focus", look);
window.addEventListener("online", look);
$("access-form").onsubmit = (event) => event.preventDefault();
$("key").onchange = () => {
  kept.made = made();
  isListed = false;
  complain();
  $("methods").querySelectorAll("label").forEach((label) => label.remove());
  $("evict").replaceChildren();
  clear();
  begin();
};

// On a phone the conversation comes first.
if (matchMedia("(max-width: 50rem)").matches) [$("drop").open, $("next").open] = [false, false];
put(kept.drafts);
restore(kept.turns ?? []);
begin();
