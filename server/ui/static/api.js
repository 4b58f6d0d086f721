/** Sends requests to the server that served this page. Knows tokens and errors; no view. */

const BASE = new URL("..", import.meta.url); // the page may lie below a path of a proxy

/**
 * The admin token and an API key ("admin", "key"), kept until the tab is closed. They are sent in a header only, never in
 * an address. After a change there is an event "change".
 */
class Access extends EventTarget {
  get(name) {
    return sessionStorage.getItem(`kvmux.${name}`) ?? "";
  }

  set(tokens) {
    for (const [name, token] of Object.entries(tokens)) sessionStorage.setItem(`kvmux.${name}`, token);
    this.dispatchEvent(new Event("change"));
  }
}

export const access = new Access();

/** An answer of the server that is an error. */
export class ApiError extends Error {
  constructor(status, message, code) {
    super(message);
    this.status = status;
    this.code = code;
  }

  /** Whether another token may help. */
  get isRefusal() {
    return this.status === 401 || this.status === 403;
  }
}

/**
 * Send a request and return its response. Throws ApiError for an error.
 *
 * `as` names the token that is sent: "admin", or "key" for what every client may do. Without a key the admin token is
 * sent there, too, which opens what describes the server.
 */
export async function send(path, { method = "GET", body, as = "key", signal, headers = {} } = {}) {
  const token = access.get(as) || access.get("admin");
  const response = await fetch(new URL(path, BASE), {
    method,
    signal,
    cache: "no-store",
    credentials: "omit",
    headers: {
      ...headers,
      ...(token && { Authorization: `Bearer ${encodeHeader(token)}` }),
      ...(body !== undefined && { "Content-Type": "application/json" }),
    },
    body: body === undefined ? undefined : JSON.stringify(body),
  });
  if (!response.ok) throw await readError(response);
  return response;
}

/** Return a text as a header has it: its UTF-8 bytes, each as a character. */
const encodeHeader = (text) => String.fromCharCode(...new TextEncoder().encode(text));

/** Send a request and return the JSON of its response. Throws ApiError for an error. */
export async function sendJson(path, options) {
  return (await send(path, options)).json();
}

async function readError(response) {
  let error = {};
  try {
    error = (await response.json()).error ?? {};
  } catch {
    // not an answer of kvmux: a proxy's, for example
  }
  return new ApiError(response.status, error.message ?? `the server answered ${response.status}`, error.code);
}

/** Yield the server-sent events of a request as {event, data}, data as it was sent. */
export async function* sendForEvents(path, options) {
  const response = await send(path, options);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) yield parseEvent(part);
    }
  } finally {
    reader.cancel().catch(() => {}); // ends the request if the caller has stopped reading
  }
}

/** Yield the chunks of a streamed answer of /v1. Throws ApiError, or the error that the stream ends with. */
export async function* sendForChunks(path, body, signal) {
  for await (const { data } of sendForEvents(path, { method: "POST", body, signal })) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    yield chunk;
  }
}

function parseEvent(text) {
  const fields = { event: "message", data: "" };
  for (const line of text.split("\n")) {
    const colon = line.indexOf(":");
    const name = line.slice(0, colon);
    if (name in fields) fields[name] = line.slice(colon + 1).replace(/^ /, "");
  }
  return fields;
}

/** Return the address of a path of the API, for code to copy. */
export function makeAddress(path) {
  return new URL(path, BASE).href;
}
