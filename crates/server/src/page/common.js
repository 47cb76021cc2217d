// What the parts of the page share: elements, numbers as text, and requests to the server.

export const $ = (id) => document.getElementById(id);

export const make = (tag, more = {}, ...children) => {
  const node = Object.assign(document.createElement(tag), more);
  node.append(...children);
  return node;
};

export const count = (n, noun) => `${n} ${noun}${n === 1 ? "" : "s"}`;
export const bytes = (n) => n < 1 << 20 ? `${(n / 1024).toFixed(1)} KiB` : n < 1 << 30 ? `${(n / (1 << 20)).toFixed(1)} MiB` : `${(n / (1 << 30)).toFixed(2)} GiB`;
export const seconds = (s) => s < .01 ? `${(s * 1000).toFixed(1)} ms` : s < 1 ? `${(s * 1000).toFixed(0)} ms` : `${s.toFixed(2)} s`;

/// Shows an error at the question, or takes the last one away.
export const tell = (error) => { $("problem").textContent = error?.message ?? error ?? ""; };

/// Shows errors at the documents, or takes the last ones away. The question may be far from there.
export const complain = (...what) => {
  $("unread").replaceChildren(...what);
  if (what.length) $("unread").scrollIntoView({ block: "nearest" });
};

/// Chooses what the next answers are from, as a click does: a search where what is wanted is not there.
export const choose = (from) => {
  const isThere = { same: !$("same").hidden, chosen: $("documents").querySelector(":checked") !== null }[from] ?? true;
  $("settings").elements.from.value = isThere ? from : "search";
  $("settings").dispatchEvent(new Event("change"));
};

/// What the page calls the fields of a request that the server's errors name.
const WORDS = [
  ["send fewer documents or messages", "tick fewer documents or begin a new conversation"],
  ['send fewer, or let a search choose parts of them ("documents": "search"; a lower refrain.search finds fewer)', "tick fewer, or choose “what a search finds”"],
  ["max_tokens is too large", "“At most” is too large"],
  ["a lower max_tokens", "a lower “At most”"],
  ["bound the cache with refrain.evict", "choose a “Cache” that holds less"],
];

/// The error of a response or of an event. That of a proxy has another shape, or none.
export function fault(error, status) {
  const unsaid = { message: `The server, or a proxy before it, answered ${status ?? "with an error"}.` };
  const { message, code } = typeof error?.message === "string" ? error : unsaid;
  return Object.assign(new Error(WORDS.reduce((text, [theirs, ours]) => text.replace(theirs, ours), message)), { code, status });
}

/// An error with the page's own words for what the browser says of a lost connection.
const lost = (message) => (error) => { throw error.name === "AbortError" ? error : Object.assign(new Error(message), { lost: true }); };

/// Sends a request. One `inBackground`, which nobody has asked for, leaves the focus where it is.
export async function request(path, { inBackground, ...options } = {}) {
  const key = $("key").value.trim();
  const refused = () => {
    if (!inBackground) {
      $("access").open = true;
      $("key").focus();
    }
    const message = key ? "The server does not know this API key: enter another one above." : "Enter your API key above.";
    return fault({ message }, 401);
  };
  // Keys are ASCII, and a header takes no character outside Latin-1.
  if (/[^\x20-\x7e]/.test(key)) throw refused();
  const headers = { "content-type": "application/json", ...(key && { authorization: `Bearer ${key}` }) };
  const response = await fetch(path, { ...options, headers }).catch(lost("The server cannot be reached."));
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  if (response.status === 401) throw refused();
  throw fault(body?.error, response.status);
}

/// The server's answer to a request. The options are those of `request`.
export const read = async (path, options) =>
  (await request(path, options)).json().catch(lost("The server, or a proxy before it, did not answer with JSON."));

/// The data of server-sent events.
export async function* events(response) {
  const broken = lost("The connection to the server broke off.");
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { value, done } = await reader.read().catch(broken);
    if (done) broken(new Error("no end was sent"));
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
}
