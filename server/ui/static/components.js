/** Parts that several views use: notices, bars, tables, dialogs, polled answers, runs. Exports Preact's functions, too. */

import { Component, h, render } from "./vendor/preact.js";
import { useCallback, useEffect, useLayoutEffect, useRef, useState } from "./vendor/hooks.js";
import htm from "./vendor/htm.js";
import { access, send, sendJson } from "./api.js";
import { useLive } from "./live.js";

export const html = htm.bind(h);
export { Component, render, useEffect, useLayoutEffect, useRef, useState };

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

/** Show the children once there is a live state; until then, why there is none. */
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

const RETRY_SECONDS = 2;

/**
 * Return {data, error, reload} of a GET of JSON, repeated every `seconds` while the page is visible, and when the tokens
 * change. It is tried again after errors, but for those that another token would mend.
 */
export function usePolled(path, { seconds = 0, as = "key" } = {}) {
  const [result, setResult] = useState({ data: null, error: null });
  const [round, setRound] = useState(0);
  const reload = useCallback(() => setRound((count) => count + 1), []);
  useLayoutEffect(() => {
    access.addEventListener("change", reload);
    return () => access.removeEventListener("change", reload);
  }, []);
  useEffect(() => {
    const abort = new AbortController();
    let timer;
    const load = async () => {
      let delay = seconds;
      try {
        if (!document.hidden || !seconds) {
          setResult({ data: await sendJson(path, { as, signal: abort.signal }), error: null });
        }
      } catch (error) {
        if (abort.signal.aborted) return;
        setResult((before) => ({ data: before.data, error }));
        if (!error.isRefusal) delay ||= RETRY_SECONDS;
      }
      if (delay && !abort.signal.aborted) timer = setTimeout(load, delay * 1000);
    };
    load();
    return () => {
      abort.abort();
      clearTimeout(timer);
    };
  }, [path, seconds, as, round]);
  return { ...result, reload };
}

/** Show a table that scrolls sideways if it is wide; `columns` are [title, isNumber], `children` the rows. */
export const ScrollTable = ({ label, caption, columns, kind, children }) =>
  html`<div class="scroll" tabindex="0" role="group" aria-label=${label}>
    <table class=${kind}>
      ${caption && html`<caption>${caption}</caption>`}
      <thead><tr>
        ${columns.map(([title, isNumber]) => html`<th scope="col" class=${isNumber ? "number" : null}>${title}</th>`)}
      </tr></thead>
      <tbody>${children}</tbody>
    </table>
  </div>`;

/** The title of the last column, whose cells have buttons. */
export const ACTIONS_TITLE = html`<span class="hidden">actions</span>`;

/** Show a form in a dialog; `onSubmit(data, close)` gets what was filled in as FormData. */
export function FormDialog({ title, button, kind, busy = false, onSubmit, onClose, children }) {
  const dialog = useRef();
  useEffect(() => {
    dialog.current.showModal();
  }, []);
  const close = () => dialog.current?.close();
  const submit = (event) => {
    event.preventDefault();
    onSubmit(new FormData(event.target), close);
  };
  return html`<dialog ref=${dialog} onClose=${onClose} aria-labelledby="dialog-title">
    <form onSubmit=${submit}>
      <h2 id="dialog-title">${title}</h2>
      ${children}
      <p class="buttons">
        <button type="button" onClick=${close}>Cancel</button>
        <button class=${kind} disabled=${busy}>${button}</button>
      </p>
    </form>
  </dialog>`;
}

/** Ask for confirmation of `action` ({title, text, button, path, method, body}), and send it with the admin token. */
function ConfirmDialog({ action, onClose, onDone = () => {} }) {
  const [error, setError] = useState("");
  const [busy, setBusy] = useState(false);
  const confirm = async (_, close) => {
    setBusy(true);
    try {
      await send(action.path, { method: action.method ?? "POST", body: action.body, as: "admin" });
      onDone();
      close();
    } catch (failure) {
      setError(failure.message);
      setBusy(false);
    }
  };
  return html`<${FormDialog} title=${action.title} button=${action.button} kind="danger" busy=${busy} onSubmit=${confirm} onClose=${onClose}>
    <p>${action.text}</p>
    ${error && html`<${Notice} kind="error">${error}<//>`}
  <//>`;
}

/** Return [dialog, ask]: `ask(action)` opens a ConfirmDialog, which has to be drawn where `dialog` is put. */
export function useConfirm(onDone) {
  const [action, setAction] = useState(null);
  const dialog = action && html`<${ConfirmDialog} action=${action} onClose=${() => setAction(null)} onDone=${onDone} />`;
  return [dialog, setAction];
}

/**
 * Return {running, redraw, start, stop} for work that can be stopped: `start(work)` runs `work(signal)`, and `redraw`
 * draws the component in the next frame, however often it is called until then. Work ends with its component.
 */
export function useRun() {
  const [, draw] = useState(0);
  const [running, setRunning] = useState(false);
  const abort = useRef(null);
  const frame = useRef(0);
  useEffect(() => () => abort.current?.abort(), []);
  const redraw = () => {
    cancelAnimationFrame(frame.current);
    frame.current = requestAnimationFrame(() => draw((count) => count + 1));
  };
  const start = async (work) => {
    abort.current = new AbortController();
    setRunning(true);
    await work(abort.current.signal);
    setRunning(false);
    redraw();
  };
  return { running, redraw, start, stop: () => abort.current?.abort() };
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
