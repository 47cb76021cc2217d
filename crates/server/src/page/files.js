// What is added to the documents: a text by hand, and files by choice or by drag.

import { $, complain, count, events, fault, make, request } from "./common.js";
import { enter } from "./documents.js";

/// What waits to be added: each has a name, and gives the body of a request. A text has its draft.
const waiting = [];
/// Drafts that were not added, and that the form has no room for yet.
const drafts = [];
/// What stops the adding; none while nothing is added.
let stop = null;
/// Most bytes of a request's body.
let most = Infinity;

const isAdding = () => stop !== null;
/// Whether an error would meet the documents that wait as well: connection, key, queue, server or room.
const meetsAll = ({ lost, status, code }) => lost || [401, 429, 503, 507].includes(status) || ["document_quota_exceeded", "disk_full"].includes(code);
/// Whether something is lost when the page is left.
export const wouldLose = () => isAdding() || drafts.length > 0;
export const limit = (bytes) => { most = bytes ?? Infinity; };

/// Adds a document, and says how far it is.
async function add(body, signal) {
  const bar = $("progress");
  bar.hidden = false;
  bar.removeAttribute("value");
  let added = [];
  const response = await request("v1/documents", { method: "POST", body: JSON.stringify({ ...body, stream: true }), signal });
  for await (const event of events(response)) {
    if (event.error) throw fault(event.error);
    if (event.object === "document.progress") [bar.max, bar.value] = [event.total || 1, event.done];
    if (event.object === "list") added = event.data;
  }
  enter(added);
  return added.length;
}

/// Adds one after the other what waits, and tells what cannot be added.
async function work() {
  stop = new AbortController();
  const { signal } = stop;
  const unread = [];
  let [documents, begun, name] = [0, 0, ""];
  complain();
  $("cancel").hidden = false;
  while (waiting.length) {
    const item = waiting.shift();
    [begun, name] = [begun + 1, item.name];
    const all = begun + waiting.length;
    $("adding").textContent = `Adding ${name}${all > 1 ? `, ${begun} of ${all}` : ""} …`;
    try {
      documents += await add(await item.body(), signal);
    } catch (error) {
      const others = signal.aborted || meetsAll(error) ? waiting.splice(0) : [];
      const reason = error.message.startsWith(`${name}: `) ? error.message : `${name}: ${error.message}`;
      unread.push(signal.aborted ? name : reason, ...others.map((other) => other.name));
      giveBack(...[item, ...others].flatMap(({ draft }) => draft ?? []));
    }
  }
  if ($("cancel") === document.activeElement) $("text").focus();
  [$("cancel").hidden, $("progress").hidden] = [true, true];
  $("adding").textContent = `${begun === 1 && documents === 1 ? `Added ${name}` : `Added ${count(documents, "document")}`}${signal.aborted ? ", then stopped" : ""}.`;
  stop = null;
  giveBack();
  const failed = unread.length ? [make("p", { textContent: "Not added:" }), make("ul", {}, ...unread.map((line) => make("li", { textContent: line })))] : [];
  if (drafts.length) failed.push(make("p", { textContent: "The form shows the next text that was not added once it is empty and left." }));
  if (failed.length) complain(...failed);
}

/// Puts the first draft that was not added into the form, unless something stands there.
function giveBack(...more) {
  drafts.push(...more);
  if (drafts.length && !$("title").value && !$("text").value) ({ title: $("title").value, text: $("text").value } = drafts.shift());
}

function take(...items) {
  if (items.length === 0) return;
  $("drop").open = true;
  waiting.push(...items);
  if (!isAdding()) work();
}

/// The bytes of a file in base64.
const base64 = (file) => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.onload = () => resolve(reader.result.split(",")[1] ?? "");
  reader.onerror = () => reject(new Error("the browser cannot open it; of a folder, choose the files"));
  reader.readAsDataURL(file);
});

/// Base64 takes four bytes for three, and a little is the request's own.
const mostOfFile = () => Math.floor((most - 2048) * 3 / 4);

const takeFiles = (files) => take(...[...files].map((file) => ({
  name: file.name,
  async body() {
    if (file.size > mostOfFile()) throw new Error(`too large: this server takes files of up to ${(mostOfFile() / (1 << 20)).toFixed(1)} MiB`);
    return { file: { name: file.name, data: await base64(file) } };
  },
})));

$("add").onsubmit = (event) => {
  event.preventDefault();
  const [title, text] = [$("title").value, $("text").value];
  // The second click of two finds nothing to add.
  if (!text.trim()) {
    if (!isAdding()) complain("Write or paste a text, or choose files.");
    return $("text").focus();
  }
  $("add").reset();
  take({
    name: title.trim() ? `“${title.trim()}”` : "the text",
    body: () => ({ title, text }),
    draft: { title, text },
  });
};
// Not at every key: those that empty the form would go on in the text that comes.
$("add").addEventListener("focusout", () => giveBack());
$("files").onchange = () => {
  takeFiles($("files").files);
  $("files").value = "";
};
$("cancel").onclick = () => stop?.abort();

// A file may be dropped anywhere: it must not replace the page.
for (const type of ["dragover", "dragleave", "drop"]) {
  window.addEventListener(type, (event) => {
    if (!event.dataTransfer?.types.includes("Files")) return;
    event.preventDefault();
    $("drop").classList.toggle("over", type === "dragover");
    if (type === "drop") takeFiles(event.dataTransfer.files);
  });
}
