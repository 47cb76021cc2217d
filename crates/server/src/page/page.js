// The playground: documents, and a conversation in which methods answer side by side. It speaks to the same routes as any client.

import { $, make, request, tell } from "./common.js";
import { submit } from "./conversation.js";
import { chosen, showDocuments } from "./documents.js";

/// What the next answers are made with; none where something is missing.
function settings() {
  const methods = [...$("methods").querySelectorAll("input:checked")].map((tick) => tick.value);
  if (methods.length === 0) return tell("Choose a method.");
  const from = $("settings").elements.from.value;
  const documents = { search: "search", chosen: chosen().map((id) => ({ id })) }[from] ?? [];
  if (from === "chosen" && documents.length === 0) return tell("Tick a document, or let a search find some.");
  const name = $("evict").value;
  const evict = name === "full" ? name : { name, capacity: Number($("capacity").value) };
  return { methods, from, documents, evict, tokens: Number($("tokens").value) };
}

$("ask").onsubmit = (event) => {
  event.preventDefault();
  const chosen = $("settings").reportValidity() && settings();
  if (chosen) submit(chosen);
};
$("settings").onsubmit = (event) => {
  event.preventDefault();
  $("question").focus();
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
