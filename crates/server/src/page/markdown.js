// An answer's Markdown as elements, as far as language models write it. What is no Markdown, or not yet while it comes, stays as it is.

import { make } from "./common.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})/;
const HEADING = /^ {0,3}(#{1,6})\s+/;
const ITEM = /^(\s*)(?:[-*+]|(\d{1,9})[.)])\s+/;
const TASK = /^\[([ xX])\]\s+/;
const QUOTE = /^ {0,3}> ?/;
/// A line between sections. It may look like an item, and is none.
const BREAK = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
/// The line below a table's head.
const RULE = /^ {0,3}\|?(?: *:?-+:? *\|)+(?: *:?-+:?)? *$/;
/// Lists and quotes inside each other, at most: what lies deeper stays text.
const MOST_DEPTH = 8;

/// Escaped marks, code, emphasis by stars or underscores, what is struck out, links with and without a label, and the line break of HTML, which
/// cells have no other for. Brackets keep their backslash: with it they enclose formulas. Emphasis of one strength may hold the other. Images are
/// links: the page loads nothing from elsewhere. A bare address ends before the punctuation of its sentence.
const INLINE = new RegExp([
  /\\(?<mark>[`*_#+|~<>-])/,
  /(?<ticks>`{1,2})(?!`)(?<code>.+?)(?<!`)\k<ticks>(?!`)/,
  /\*{3}(?![\s*])(?<both>[^*\n]+?)(?<!\s)\*{3}(?!\*)/,
  /\*{2}(?![\s*])(?<strong>(?:\\.|[^*\n\\]|\*(?![\s*])[^*\n]+\*)+?)(?<!\s)\*{2}(?!\*)/,
  /\*(?![\s*])(?<em>(?:\\.|[^*\n\\]|\*{2}(?![\s*])[^*\n]+\*{2})+?)(?<!\s)\*(?!\*)/,
  /(?<!\w)(?<lines>_{1,3})(?![\s_])(?<underlined>[^_\n]+?)(?<!\s)\k<lines>(?!\w)/,
  /~~(?![\s~])(?<struck>[^~\n]+?)(?<!\s)~~(?!~)/,
  /!?\[(?<label>[^[\]\n]*)\]\((?<href>https?:\/\/(?:[^\s()<>]|\([^\s()<>]*\))+)(?: +"[^"\n]*")?\)/,
  /<(?<enclosed>https?:\/\/[^\s<>]+)>/,
  /(?<!\w)(?<bare>https?:\/\/(?:[^\s()[\]<>`"“”、。，]|\([^\s()<>]*\))*(?:[^\s()[\]<>`"“”、。，.,:;!?'*_~]|\([^\s()<>]*\)))/,
  /(?<newline><[bB][rR] ?\/?>)/,
].map(({ source }) => source).join("|"), "g");

const emphasised = (strength, text, isLink) =>
  strength === 1 ? make("em", {}, ...inline(text, isLink)) : make("strong", {}, ...(strength === 3 ? [emphasised(1, text, isLink)] : inline(text, isLink)));

/// A text as nodes. Within a link there are no further ones.
function inline(text, isLink = false) {
  const nodes = [];
  let end = 0;
  for (const { 0: whole, index, groups } of text.matchAll(INLINE)) {
    const { mark, code, both, strong, em, lines, underlined, struck, label, href = groups.enclosed ?? groups.bare, newline } = groups;
    nodes.push(text.slice(end, index));
    end = index + whole.length;
    if (mark) nodes.push(mark);
    else if (code) nodes.push(make("code", { textContent: code }));
    else if (newline) nodes.push(make("br"));
    else if (struck) nodes.push(make("del", {}, ...inline(struck, isLink)));
    else if (href && isLink) nodes.push(href);
    else if (href) nodes.push(make("a", { href, title: href, target: "_blank", rel: "noopener noreferrer" }, ...(label ? inline(label, true) : [href])));
    else nodes.push(emphasised(lines?.length ?? (both ? 3 : strong ? 2 : 1), underlined ?? both ?? strong ?? em, isLink));
  }
  return [...nodes, text.slice(end)].filter((node) => node !== "");
}

/// The lines of a text in blocks: code, headings, lines between sections, quotes, lists, tables and paragraphs.
function blocks(text) {
  const lines = text.split("\n");
  const found = [];
  const is = (kind, at) => at < lines.length && kind.test(lines[at]);
  for (let at = 0; at < lines.length;) {
    const start = at++;
    const first = lines[start];
    if (!first.trim()) continue;
    const [fence, item] = [first.match(FENCE)?.[1], BREAK.test(first) ? null : first.match(ITEM)];
    if (fence) {
      while (at < lines.length && !(lines[at].trim().startsWith(fence) && !lines[at].trim().replaceAll(fence[0], ""))) at++;
      at++;
    } else if (QUOTE.test(first)) {
      while (is(QUOTE, at)) at++;
    } else if (item) {
      const goesOn = (line) => {
        const next = line.match(ITEM);
        return next ? !BREAK.test(line) && (next[1].length > item[1].length || !next[2] === !item[2]) : /^\s+\S/.test(line);
      };
      while (at < lines.length && goesOn(lines[at].trim() ? lines[at] : lines[at + 1] ?? "")) at++;
    } else if (first.includes("|") && is(RULE, at)) {
      while (is(/\|/, at)) at++;
    } else if (!HEADING.test(first) && !BREAK.test(first)) {
      while (is(/\S/, at) && ![FENCE, HEADING, BREAK, QUOTE, ITEM].some((kind) => is(kind, at)) && !is(RULE, at + 1)) at++;
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
  const nodes = items.map(([first, ...more]) => {
    const task = first.match(TASK);
    const content = blocks([task ? first.slice(task[0].length) : first, ...more].join("\n")).flatMap((source, i) => {
      const node = block(source, depth + 1);
      return i === 0 && node.localName === "p" ? [...node.childNodes] : node;
    });
    return task ? make("li", { className: "task" }, task[1] === " " ? "☐ " : "☑ ", ...content) : make("li", {}, ...content);
  });
  return number ? make("ol", { dir: "auto", start: number }, ...nodes) : make("ul", { dir: "auto" }, ...nodes);
}

/// The cells of a table's line. Bars are part of a cell where they are escaped, or within code.
const cells = (line) => line.trim().replace(/^\||(?<!\\)\|$/g, "")
  .replace(/\\.|`[^`]+`|\|/g, (part) => part === "|" ? "\n" : part).split("\n")
  .map((cell) => cell.trim().replaceAll("\\|", "|"));

function table([head, rule, ...rows]) {
  // Colons say to which side a column goes.
  const sides = cells(rule).map((cell) => cell.endsWith(":") ? { className: cell.startsWith(":") ? "center" : "right" } : {});
  const row = (line, tag, more) => make("tr", {}, ...cells(line).map((cell, i) => make(tag, { ...more, ...sides[i] }, ...inline(cell))));
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
  if (BREAK.test(lines[0])) return make("hr");
  if (QUOTE.test(lines[0]) && depth < MOST_DEPTH) {
    const quoted = lines.map((line) => line.replace(QUOTE, "")).join("\n");
    return make("blockquote", { dir: "auto" }, ...blocks(quoted).map((source) => block(source, depth + 1)));
  }
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
