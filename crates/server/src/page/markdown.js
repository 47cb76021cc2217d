// An answer's Markdown as elements, as far as language models write it. What is no Markdown, or not yet while it comes, stays as it is.

import { make } from "./common.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})/;
const HEADING = /^ {0,3}(#{1,6})\s+/;
const ITEM = /^(\s*)(?:[-*+]|(\d{1,9})[.)])\s+/;
const RULE = /^ {0,3}\|?(?: *:?-+:? *\|)+(?: *:?-+:?)? *$/;
/// Lists inside each other, at most: what lies deeper stays text.
const MOST_DEPTH = 8;

/// Escaped marks, code, emphasis by stars or underscores, and links. Brackets keep their backslash: with it they enclose formulas. Emphasis of
/// one strength may hold the other.
const INLINE = new RegExp([
  /\\(?<mark>[`*_#+|~<>-])/,
  /(?<ticks>`{1,2})(?!`)(?<code>.+?)(?<!`)\k<ticks>(?!`)/,
  /\*{3}(?![\s*])(?<both>[^*\n]+?)(?<!\s)\*{3}(?!\*)/,
  /\*{2}(?![\s*])(?<strong>(?:\\.|[^*\n\\]|\*(?![\s*])[^*\n]+\*)+?)(?<!\s)\*{2}(?!\*)/,
  /\*(?![\s*])(?<em>(?:\\.|[^*\n\\]|\*{2}(?![\s*])[^*\n]+\*{2})+?)(?<!\s)\*(?!\*)/,
  /(?<!\w)(?<lines>_{1,3})(?![\s_])(?<underlined>[^_\n]+?)(?<!\s)\k<lines>(?!\w)/,
  /\[(?<label>[^[\]\n]+)\]\((?<href>https?:\/\/(?:[^\s()<>]|\([^\s()<>]*\))+)\)/,
].map(({ source }) => source).join("|"), "g");

const emphasised = (strength, text) =>
  strength === 1 ? make("em", {}, ...inline(text)) : make("strong", {}, ...(strength === 3 ? [emphasised(1, text)] : inline(text)));

function inline(text) {
  const nodes = [];
  let end = 0;
  for (const { 0: whole, index, groups: { mark, code, both, strong, em, lines, underlined, label, href } } of text.matchAll(INLINE)) {
    nodes.push(text.slice(end, index));
    end = index + whole.length;
    if (mark) nodes.push(mark);
    else if (code) nodes.push(make("code", { textContent: code }));
    else if (href) nodes.push(make("a", { href, title: href, target: "_blank", rel: "noopener noreferrer" }, ...inline(label)));
    else nodes.push(emphasised(lines?.length ?? (both ? 3 : strong ? 2 : 1), underlined ?? both ?? strong ?? em));
  }
  return [...nodes, text.slice(end)].filter((node) => node !== "");
}

/// The lines of a text in blocks: code, headings, lists, tables and paragraphs.
function blocks(text) {
  const lines = text.split("\n");
  const found = [];
  const is = (kind, at) => at < lines.length && kind.test(lines[at]);
  for (let at = 0; at < lines.length;) {
    const start = at++;
    const first = lines[start];
    if (!first.trim()) continue;
    const [fence, item] = [first.match(FENCE)?.[1], first.match(ITEM)];
    if (fence) {
      while (at < lines.length && !(lines[at].trim().startsWith(fence) && !lines[at].trim().replaceAll(fence[0], ""))) at++;
      at++;
    } else if (item) {
      const goesOn = (line) => {
        const next = line.match(ITEM);
        return next ? next[1].length > item[1].length || !next[2] === !item[2] : /^\s+\S/.test(line);
      };
      while (at < lines.length && goesOn(lines[at].trim() ? lines[at] : lines[at + 1] ?? "")) at++;
    } else if (first.includes("|") && is(RULE, at)) {
      while (is(/\|/, at)) at++;
    } else if (!HEADING.test(first)) {
      while (is(/\S/, at) && ![FENCE, HEADING, ITEM].some((kind) => is(kind, at)) && !is(RULE, at + 1)) at++;
    }
    found.push(lines.slice(start, at).join("\n"));
  }
  return found;
}

function list(lines, depth) {
  const [, indent, number] = lines[0].match(ITEM);
  const items = [];
  let width = 0;
  for (const line of lines) {
    const item = line.match(ITEM);
    if (item && item[1].length <= indent.length) {
      width = item[0].length;
      items.push([line.slice(width)]);
    } else items.at(-1).push(line.slice(Math.min(width, line.search(/\S|$/))));
  }
  const nodes = items.map((item) => make("li", {}, ...blocks(item.join("\n")).flatMap((source, i) => {
    const node = block(source, depth + 1);
    return i === 0 && node.localName === "p" ? [...node.childNodes] : node;
  })));
  return number ? make("ol", { dir: "auto", start: number }, ...nodes) : make("ul", { dir: "auto" }, ...nodes);
}

/// The cells of a table's line. Bars are part of a cell where they are escaped, or within code.
const cells = (line) => line.trim().replace(/^\||(?<!\\)\|$/g, "")
  .replace(/\\.|`[^`]+`|\|/g, (part) => part === "|" ? "\n" : part).split("\n")
  .map((cell) => inline(cell.trim().replaceAll("\\|", "|")));

function table([head, , ...rows]) {
  const row = (line, tag, more) => make("tr", {}, ...cells(line).map((cell) => make(tag, more, ...cell)));
  const inner = make("table", { dir: "auto" }, make("thead", {}, row(head, "th", { scope: "col" })), make("tbody", {}, ...rows.map((line) => row(line, "td"))));
  return scrolls(make("div", {}, inner), "Table");
}

/// What is too wide scrolls by itself, by keyboard as well.
function scrolls(node, name) {
  [node.className, node.tabIndex, node.ariaLabel] = ["wide", 0, name];
  node.setAttribute("role", "group");
  return node;
}

function block(source, depth) {
  const lines = source.split("\n");
  const [fence, heading] = [lines[0].match(FENCE)?.[1], lines[0].match(HEADING)];
  if (fence) {
    const closed = lines.length > 1 && lines.at(-1).trim().startsWith(fence);
    return scrolls(make("pre", {}, make("code", { textContent: lines.slice(1, closed ? -1 : undefined).join("\n") })), "Code");
  }
  // The page's own headings go to the fourth level.
  if (heading) return make(heading[1].length === 1 ? "h5" : "h6", { dir: "auto" }, ...inline(source.slice(heading[0].length)));
  if (ITEM.test(lines[0]) && depth < MOST_DEPTH) return list(lines, depth);
  if (lines.length > 1 && lines[0].includes("|") && RULE.test(lines[1])) return table(lines);
  return make("p", { dir: "auto" }, ...inline(source));
}

/// Gives a node other children. Children that are alike in both stay, and with them the selection, the focus and places of scrolling.
function become(node, children) {
  children.forEach((child, i) => {
    const there = node.childNodes[i];
    if (there === child) return;
    if (!there) node.append(child);
    else if (there.data && child.data?.startsWith(there.data)) there.appendData(child.data.slice(there.length));
    else if (there.localName && there.cloneNode(false).isEqualNode(child.cloneNode(false))) become(there, [...child.childNodes]);
    else there.replaceWith(child);
  });
  while (node.childNodes.length > children.length) node.lastChild.remove();
}

/// Shows a text in a place. Blocks of the same source are not made again.
export function render(place, text) {
  const sources = blocks(text);
  become(place, sources.map((source, i) => source === place.children[i]?.source ? place.children[i] : block(source, 0)));
  sources.forEach((source, i) => { place.children[i].source = source; });
}
