// The documents that the server keeps, as a list from which they are ticked, pinned and removed.

import { $, choose, complain, count, make, request } from "./common.js";
import { forget } from "./conversation.js";

/// Documents of a page of the server's list, which is in the order of their ids.
const PAGE = 1000;
/// Documents that are looked over without a filter.
const FEW = 6;
/// The rows of the documents that are known, by id.
const rows = new Map();
/// Pages that are listed, and whether there are more.
let [pages, hasMore] = [1, false];

/// Lists the stored documents. The options are those of `request`.
export async function showDocuments(options) {
  const found = new Map();
  let [after, more] = ["", true];
  for (let page = 0; page < pages && more; page++) {
    const list = await (await request(`v1/documents?limit=${PAGE}${after && `&after=${after}`}`, options)).json();
    for (const kept of list.data) found.set(kept.id, kept);
    [after, more] = [list.last_id ?? after, list.has_more];
  }
  hasMore = more;
  // What was added here may lie behind the last page.
  for (const id of rows.keys()) if (!found.has(id) && !(more && id > after)) rows.delete(id);
  enter(found.values());
}

/// Enters documents into the list, or what is new of them.
export function enter(documents) {
  for (const kept of documents) {
    const row = rows.get(kept.id) ?? rows.set(kept.id, new Row()).get(kept.id);
    row.show(kept);
  }
  draw();
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
    await attempt(async () => this.show(await (await request(`v1/documents/${this.kept.id}/pin`, options)).json()));
  }

  async remove() {
    const { id, title } = this.kept;
    if (!confirm(`Remove “${title}” for good?`)) return;
    await attempt(async () => {
      await request(`v1/documents/${id}`, { method: "DELETE" });
      const [shown, held] = [inView(), this.node.contains(document.activeElement)];
      const next = shown[shown.indexOf(this) + 1] ?? shown[shown.indexOf(this) - 1];
      rows.delete(id);
      forget(id);
      draw();
      ticked();
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
const sorted = () => [...rows.values()].sort((a, b) => order(a.kept, b.kept));
const inView = () => sorted().filter((row) => !row.node.hidden);

/// Shows the rows whose titles the filter finds. The focus stays, and so does the place in the list.
function draw() {
  const [list, wanted, held, top] = [$("documents"), $("filter").value.trim().toLowerCase(), document.activeElement, $("documents").scrollTop];
  for (const { kept, node } of rows.values()) node.hidden = !kept.title.toLowerCase().includes(wanted);
  list.replaceChildren(...sorted().map((row) => row.node));
  if (inView().length === 0) list.append(make("li", { textContent: rows.size ? "No title has that." : "None yet: add a text or files below." }));
  list.scrollTop = top;
  if (list.contains(held) && held !== document.activeElement) held.focus({ preventScroll: true });
  $("find").hidden = rows.size <= FEW && !wanted;
  $("more").hidden = !hasMore;
  tell();
}

/// Ids of the documents that are ticked, whether the filter finds them or not.
export const chosen = () => sorted().filter((row) => row.tick.checked).map((row) => row.kept.id);

/// Ticks documents by id.
export function tick(ids) {
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
  const [any, from] = [chosen().length > 0, $("settings").elements.from.value];
  if (any && from !== "chosen") {
    beforeTicks = from;
    choose("chosen");
  }
  if (!any && from === "chosen") choose(beforeTicks);
  tell();
}

$("documents").onchange = ticked;
$("all").onchange = () => {
  for (const row of inView()) row.tick.checked = $("all").checked;
  ticked();
};
$("filter").oninput = draw;
$("more").onclick = () => attempt(async () => {
  pages++;
  await showDocuments();
  if (!hasMore) $("filter").focus();
});
// Another tab, or another program, may have added some meanwhile.
document.addEventListener("visibilitychange", () => { if (!document.hidden) showDocuments({ inBackground: true }).catch(() => {}); });
