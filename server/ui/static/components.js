/** Parts that several views use: notices, meters, dialogs, polled answers. Exports Preact's functions for all views. */

import { Component, h, render } from "./vendor/preact.js";
import { useCallback, useEffect, useLayoutEffect, useMemo, useRef, useState } from "./vendor/hooks.js";
import htm from "./vendor/htm.js";
import { send, sendJson } from "./api.js";
import { useLive } from "./live.js";

export const html = htm.bind(h);
export { Component, render, useCallback, useEffect, useLayoutEffect, useMemo, useRef, useState };

export const NUM_COLORS = 8;

/** Return the class with the colour of the instance of this index. */
export const colorClass = (index) => `c${index % NUM_COLORS}`;

/** Show a message of a kind: "info", "error". */
export const Notice = ({ kind = "info", children }) =>
  html`<p class=${`notice ${kind}`} role=${kind === "error" ? "alert" : "status"}>${children}</p>`;

/** Show a name with the colour of its instance. */
export const InstanceName = ({ name, index }) =>
  html`<span class="instance"><i class=${`swatch ${colorClass(index)}`}></i>${name}</span>`;

/** Show a title, a figure and a remark. */
export const Figure = ({ title, children, note }) =>
  html`<div class="figure"><dt>${title}</dt><dd>${children}${note && html`<small>${note}</small>`}</dd></div>`;

/**
 * Show parts of a whole as a bar; the figures must be in text beside it.
 *
 * `parts` are {label, value, kind, color}; `marks` are {label, value, kind}: lines across the bar.
 */
export function Bar({ parts, total, label, marks = [] }) {
  const width = (value) => ({ width: `${total ? (100 * value) / total : 0}%` });
  const left = (value) => ({ left: `${total ? Math.min(100, (100 * value) / total) : 0}%` });
  return html`<div class="bar" role="img" aria-label=${label}>
    ${parts.map((part) => html`<i key=${part.label} class=${`part ${part.kind ?? ""} ${part.color ?? ""}`} style=${width(part.value)}></i>`)}
    ${marks.map((mark) => html`<b key=${mark.label} class=${mark.kind} style=${left(mark.value)} title=${mark.label}></b>`)}
  </div>`;
}

/** Draw its children once there is a live state, and else why there is none. */
export function WithLive({ children }) {
  const live = useLive();
  if (live.status === "refused") {
    return html`<${Notice} kind="error">${live.message}<//>`;
  }
  if (live.state === null) {
    return html`<${Notice}>${live.status === "unavailable" ? `Waiting: ${live.message}` : "Loading…"}<//>`;
  }
  return html`${live.status === "unavailable" && html`<${Notice} kind="error">Not up to date: ${live.message}<//>`}
    ${children(live.state, live)}`;
}

/** Return {data, error, reload} of a GET of JSON, repeated every `seconds` while the page is visible. */
export function usePolled(path, { seconds = 0, as = "key" } = {}) {
  const [result, setResult] = useState({ data: null, error: null });
  const [round, setRound] = useState(0);
  useEffect(() => {
    const abort = new AbortController();
    let timer;
    const load = async () => {
      try {
        if (!document.hidden || !seconds) {
          setResult({ data: await sendJson(path, { as, signal: abort.signal }), error: null });
        }
      } catch (error) {
        if (!abort.signal.aborted) setResult((before) => ({ data: before.data, error }));
      }
      if (seconds && !abort.signal.aborted) timer = setTimeout(load, seconds * 1000);
    };
    load();
    return () => {
      abort.abort();
      clearTimeout(timer);
    };
  }, [path, seconds, as, round]);
  return { ...result, reload: useCallback(() => setRound((count) => count + 1), []) };
}

/** Let people confirm what `action` describes ({title, text, button, path, method, body}); it is sent as the operator. */
export function ConfirmDialog({ action, onClose, onDone = () => {} }) {
  const dialog = useRef();
  const [error, setError] = useState("");
  const [busy, setBusy] = useState(false);
  useEffect(() => {
    dialog.current?.showModal();
  }, []);
  const confirm = async (event) => {
    event.preventDefault();
    setBusy(true);
    try {
      await send(action.path, { method: action.method ?? "POST", body: action.body, as: "admin" });
      onDone();
      dialog.current.close();
    } catch (failure) {
      setError(failure.message);
      setBusy(false);
    }
  };
  return html`<dialog ref=${dialog} onClose=${onClose} aria-labelledby="confirm-title">
    <form onSubmit=${confirm}>
      <h2 id="confirm-title">${action.title}</h2>
      <p>${action.text}</p>
      ${error && html`<${Notice} kind="error">${error}<//>`}
      <p class="buttons">
        <button type="button" onClick=${() => dialog.current.close()}>Cancel</button>
        <button class="danger" disabled=${busy}>${action.button}</button>
      </p>
    </form>
  </dialog>`;
}

/** Return [dialog, ask]: `ask(action)` opens a ConfirmDialog, which has to be drawn where `dialog` is put. */
export function useConfirm(onDone) {
  const [action, setAction] = useState(null);
  const dialog = action && html`<${ConfirmDialog} action=${action} onClose=${() => setAction(null)} onDone=${onDone} />`;
  return [dialog, setAction];
}

async function writeToClipboard(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  // Pages without TLS have no clipboard, unless they come from this machine
  const area = document.body.appendChild(Object.assign(document.createElement("textarea"), { value: text }));
  area.select();
  document.execCommand("copy");
  return area.remove();
}

/** Copy a text to the clipboard, with a button that says so. */
export function CopyButton({ text, children = "Copy" }) {
  const [done, setDone] = useState(false);
  const copy = async () => {
    await writeToClipboard(typeof text === "function" ? text() : text);
    setDone(true);
    setTimeout(() => setDone(false), 2000);
  };
  return html`<button type="button" onClick=${copy}><span aria-live="polite">${done ? "Copied" : children}</span></button>`;
}
