// The documents that the server keeps, as a list from which they are ticked, pinned and removed.

import { $, choose, complain, count, make, read, request } from "./common.js";
import { forget } from "./conversation.js";

/// Documents of a page of the server's list, which is in the order of their ids.
const PAGE = 1000;
/// Documents that are looked over without a filter.
const FEW = 6;
/// The rows of the documents that are known, by id, in the order of the list.
const rows = new Map();
/// Pages that are listed, and whether there are more.
let [pages, hasMore] = [1, false];
/// Times that the rows have changed.
let changes = 0;

/// Lists the stored documents. The options are those of `request`.
export async function showDocuments(options) {
  const [found, before] = [new Map(), changes];
  let [after, more] = ["", true];
  for (let page = 0; page < pages && more; page++) {
    const list = await read(`v1/documents?limit=${PAGE}${after && `&after=${after}`}`, options);
    for (const kept of list.data) found.set(kept.id, kept);
    [after, more] = [list.last_id ?? after, list.has_more];
  }
  // A list that was made before a change does not have it.
  if (changes !== before) return showDocuments(options);
  hasMore = more;
  // What was added here may lie behind the last page.
  for (const id of [...rows.keys()]) if (!found.has(id) && !(more && id > after)) lose(id);
  enter(found.values());
}

/// Enters documents into the list, or what is new of them.
export function enter(documents) {
  changes++;
  for (const kept of documents) {
    const row = rows.get(kept.id) ?? rows.set(kept.id, new Row()).get(kept.id);
    row.show(kept);
  }
  draw();
}

/// Forgets a document that was removed. The list is drawn by the caller.
function lose(id) {
  const wasTicked = rows.get(id)?.tick.checked;
  changes++;
  rows.delete(id);
  forget(id);
  if (wasTicked) leaveTicks();
}

/// Empties the list: another key has other documents.
export function clear() {
  changes++;
  rows.clear();
  [pages, hasMore] = [1, false];
  draw();
  none.remove();
  $("counted").textContent = "";
}

class Row {
  constructor() {
    this.tick = make("input", { type: "checkbox" });
    [this.title, this.more] = [make("bdi"), make("small")];
    [this.pin, this.gone] = [() => this.turnPin(), () => this.remove()].map((onclick) => make("button", { type: "button", className: "quiet", onclick }));
    this.gone.textContent = "remove";
    this.node = make("li", {}, make("label", {}, this.tick, " ", this.title, " ", this.more), this.pin, this.gone);
  }

  show(kept) {
    this.kept = kept;
    this.tick.value = kept.id;
    this.title.textContent = kept.title;
    this.more.textContent = `${count(kept.tokens, "token")}${kept.published === false ? ", not yet shared" : ""}`;
    this.pin.textContent = kept.pinned ? "unpin" : "pin";
    for (const button of [this.pin, this.gone]) button.ariaLabel = `${button.textContent} ${kept.title}`;
  }

  async turnPin() {
    const options = { method: "POST", body: JSON.stringify({ pinned: !this.kept.pinned }) };
    await attempt(async () => enter([await read(`v1/documents/${this.kept.id}/pin`, options)]));
  }

  async remove() {
    const { id, title } = this.kept;
    if (!confirm(`Remove “${title}” for good?`)) return;
    await attempt(async () => {
      // Another window may have removed it.
      await request(`v1/documents/${id}`, { method: "DELETE" }).catch((error) => { if (error.code !== "not_found") throw error; });
      const [shown, held] = [inView(), this.node.contains(document.activeElement)];
      const next = shown[shown.indexOf(this) + 1] ?? shown[shown.indexOf(this) - 1];
      lose(id);
      draw();
      if (held) (next?.gone ?? $("title")).focus();
      $("adding").textContent = `“${title}” was removed.`;
    });
  }
}

async function attempt(change) {
  complain();
  try { await change(); } catch ({ message }) { complain(message); }
}

const names = new Intl.Collator(undefined, { numeric: true });
/// The newest first.
const order = (a, b) => b.created - a.created || names.compare(a.title, b.title);
const inView = () => [...rows.values()].filter((row) => !row.node.hidden);
/// Stands in the list where no row is in view.
const none = make("li");

/// Puts the rows in order, where they are not. The focus stays, and so does the place in the list.
function draw() {
  const [list, held, top] = [$("documents"), document.activeElement, $("documents").scrollTop];
  const sorted = [...rows].sort(([, a], [, b]) => order(a.kept, b.kept));
  rows.clear();
  for (const [id, row] of sorted) rows.set(id, row);
  none.remove();
  if (list.children.length !== rows.size || sorted.some(([, { node }], i) => node !== list.children[i])) {
    list.replaceChildren(...sorted.map(([, { node }]) => node));
    list.scrollTop = top;
    if (list.contains(held) && held !== document.activeElement) held.focus({ preventScroll: true });
  }
  $("more").hidden = !hasMore;
  filter();
}

/// Shows the rows whose titles the filter finds.
function filter() {
  const wanted = $("filter").value.trim().toLowerCase();
  for (const { kept, node } of rows.values()) node.hidden = !kept.title.toLowerCase().includes(wanted);
  none.textContent = rows.size === 0 ? "None yet: add a text or files below."
    : hasMore ? "None of the titles listed so far has that: list more." : "No title has that.";
  if (inView().length === 0) $("documents").append(none);
  else none.remove();
  $("find").hidden = rows.size <= FEW && !wanted;
  tell();
}

/// Ids of the documents that are ticked, whether the filter finds them or not.
export const chosen = () => [...rows.values()].filter((row) => row.tick.checked).map((row) => row.kept.id);

/// Ticks documents by id, also those behind the pages that are listed. Removed ones are left out. The options are those of `request`.
export async function tick(ids, options) {
  const behind = [];
  for (const id of hasMore ? ids.filter((id) => !rows.has(id)) : []) {
    try { behind.push(await read(`v1/documents/${id}`, options)); } catch (error) { if (error.code !== "not_found") throw error; }
  }
  enter(behind);
  for (const id of ids) if (rows.has(id)) rows.get(id).tick.checked = true;
  tell();
}

/// Says how many documents there are.
function tell() {
  const [shown, ticked] = [inView(), chosen().length];
  const all = `${rows.size}${hasMore ? " and more" : ""}`;
  $("counted").textContent = `${shown.length < rows.size ? `${shown.length} of ${all}` : all}${ticked ? `, ${ticked} ticked` : ""}`;
  $("all").checked = shown.length > 0 && shown.every((row) => row.tick.checked);
  $("all").indeterminate = !$("all").checked && shown.some((row) => row.tick.checked);
}

let beforeTicks = "search";
/// Answers come from the documents ticked as long as there are any.
function ticked() {
  const from = $("settings").elements.from.value;
  if (chosen().length > 0 && from !== "chosen") {
    beforeTicks = from;
    choose("chosen");
  }
  leaveTicks();
}

/// Where nothing is ticked any more, answers come from what they came from before.
function leaveTicks() {
  if (chosen().length === 0 && $("settings").elements.from.value === "chosen") choose(beforeTicks);
  tell();
}

$("documents").onchange = ticked;
$("all").onchange = () => {
  for (const row of inView()) row.tick.checked = $("all").checked;
  ticked();
};
$("filter").oninput = filter;
$("more").onclick = () => attempt(async () => {
  pages++;
  await showDocuments();
  if (!hasMore) $("filter").focus();
});
