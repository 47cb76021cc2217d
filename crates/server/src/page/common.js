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

/// Shows an error, or takes the last one away.
export const tell = (error) => { $("problem").textContent = error?.message ?? error ?? ""; };

const headers = () => {
  const key = $("key").value.trim();
  return { "content-type": "application/json", ...(key && { authorization: `Bearer ${key}` }) };
};

export async function request(path, options = {}) {
  const response = await fetch(path, { ...options, headers: headers() });
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  if (response.status === 401) $("access").open = true;
  throw new Error(body?.error?.message ?? `${response.status} ${response.statusText}`);
}

/// The data of server-sent events.
export async function* events(response) {
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
