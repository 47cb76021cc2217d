// The documents that the server keeps: a list, and what is added by hand, from files or by drag.

import { $, count, events, make, request, tell } from "./common.js";

/// Lists the stored documents.
export async function showDocuments() {
  const { data, has_more: more } = await (await request("v1/documents?limit=500")).json();
  const ticked = new Set(chosen());
  const item = (kept) => {
    const tick = make("input", { type: "checkbox", value: kept.id, checked: ticked.has(kept.id) });
    const name = make("label", {}, tick, ` ${kept.title} `, make("small", { textContent: `${kept.tokens} tokens${kept.published === false ? ", not yet shared" : ""}` }));
    const pin = make("button", { type: "button", className: "quiet", textContent: kept.pinned ? "unpin" : "pin" });
    pin.ariaLabel = `${pin.textContent} ${kept.title}`;
    pin.onclick = () => change(`v1/documents/${kept.id}/pin`, { method: "POST", body: JSON.stringify({ pinned: !kept.pinned }) });
    const gone = make("button", { type: "button", className: "quiet", textContent: "remove" });
    gone.ariaLabel = `remove ${kept.title}`;
    gone.onclick = () => change(`v1/documents/${kept.id}`, { method: "DELETE" });
    return make("li", {}, name, pin, gone);
  };
  const last = data.length === 0 ? [make("li", { textContent: "None yet: add a text or files below." })] : more ? [make("li", { textContent: "… and more" })] : [];
  $("documents").replaceChildren(...data.map(item), ...last);
}

/// Ids of the documents that are ticked.
export const chosen = () => [...$("documents").querySelectorAll("input:checked")].map((tick) => tick.value);

async function change(path, options) {
  try {
    await request(path, options);
    await showDocuments();
  } catch (error) { tell(error); }
}

/// Adds a text or a file, and gives the documents that it holds.
async function add(document) {
  const bar = $("progress");
  bar.hidden = false;
  bar.removeAttribute("value");
  let added = [];
  try {
    const response = await request("v1/documents", { method: "POST", body: JSON.stringify({ ...document, stream: true }) });
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      if (event.object === "document.progress") [bar.max, bar.value] = [event.total || 1, event.done];
      if (event.object === "list") added = event.data;
    }
    await showDocuments();
    return added;
  } finally {
    bar.hidden = true;
  }
}

/// The bytes of a file in base64.
const base64 = (file) => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.onload = () => resolve(reader.result.split(",")[1] ?? "");
  reader.onerror = () => reject(new Error("the browser cannot open it; of a folder, choose the files"));
  reader.readAsDataURL(file);
});

/// Adds files one after the other, and tells those that cannot be read.
async function addFiles(files) {
  const unread = [];
  let documents = 0;
  $("unread").replaceChildren();
  for (const [index, file] of files.entries()) {
    $("adding").textContent = `Adding ${file.name}, ${index + 1} of ${files.length} …`;
    try {
      documents += (await add({ file: { name: file.name, data: await base64(file) } })).length;
    } catch ({ message }) {
      unread.push(message.startsWith(`${file.name}: `) ? message : `${file.name}: ${message}`);
    }
  }
  $("adding").textContent = `${count(documents, "document")} added from ${count(files.length - unread.length, "file")}.`;
  if (unread.length === 0) return;
  const lines = unread.map((line) => make("li", { textContent: line }));
  $("unread").replaceChildren(make("p", { textContent: "Not added:" }), make("ul", {}, ...lines));
}

$("add").onsubmit = async (event) => {
  event.preventDefault();
  tell();
  try {
    await add({ title: $("title").value, text: $("text").value });
    $("add").reset();
  } catch (error) { tell(error); }
};
// Files that come while others are added wait for them.
let adding = Promise.resolve();
const take = (files) => { if (files.length) adding = adding.then(() => addFiles(files)).catch(tell); };
$("files").onchange = () => {
  take([...$("files").files]);
  $("files").value = "";
};
const carriesFiles = (event) => event.dataTransfer?.types.includes("Files");
const mark = (event) => $("drop").classList.toggle("over", event.type === "dragover" && $("drop").contains(event.target));
// Beside the documents too a file must not replace the page.
for (const type of ["dragover", "dragleave", "drop"]) {
  window.addEventListener(type, (event) => {
    if (!carriesFiles(event)) return;
    event.preventDefault();
    mark(event);
    if (type === "drop" && $("drop").contains(event.target)) take([...event.dataTransfer.files]);
  });
}
