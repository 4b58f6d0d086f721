/**
 * Follows GET /v1/live/events: the state of the server twice a second, and what is needed of the last minutes for rates.
 *
 * The stream is open while the page is visible: the header of every view shows its status. A page in the background
 * closes it, and costs nothing.
 */

import { useLayoutEffect, useReducer } from "./vendor/hooks.js";
import { access, sendForEvents } from "./api.js";

const HISTORY_SECONDS = 330; // five minutes to draw, and the time before them over which the first rates are counted
const RETRY_SECONDS = 2;
const SILENT_SECONDS = 15; // without an event, after which the connection counts as lost

/** Return `target` changed by a JSON merge patch (RFC 7396); unchanged parts stay the same objects. */
export function applyMergePatch(target, patch) {
  const result = { ...target };
  for (const [key, value] of Object.entries(patch)) {
    if (value === null) delete result[key];
    else if (isObject(value) && isObject(result[key])) result[key] = applyMergePatch(result[key], value);
    else result[key] = value;
  }
  return result;
}

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

const decodeBytes = (text) => Uint8Array.from(atob(text), (character) => character.charCodeAt(0));

class Live {
  state = null; // the answer of GET /v1/live, with the states of each region as Uint8Array
  status = "connecting"; // "open", "unavailable" (no engine, or no server) or "refused"
  message = "";
  history = []; // {time, totals, num_running, num_waiting}, oldest first
  #listeners = new Set();
  #abort = null; // of the open stream
  #timer = null; // that ends a silent connection

  constructor() {
    document.addEventListener("visibilitychange", () => this.#update());
    access.addEventListener("change", () => this.#restart());
  }

  /** Call `listener` after each change until the returned function is called. */
  subscribe(listener) {
    this.#listeners.add(listener);
    this.#update();
    return () => this.#listeners.delete(listener);
  }

  /** Connect again, with the present token. */
  #restart() {
    this.#close();
    this.status = "connecting";
    this.#notify();
    this.#update();
  }

  #close() {
    clearTimeout(this.#timer);
    this.#abort?.abort();
    this.#abort = null;
  }

  #update() {
    if (document.hidden) {
      this.#close();
    } else if (this.#abort === null) {
      this.#abort = new AbortController();
      this.#follow(this.#abort.signal);
    }
  }

  async #follow(signal) {
    while (!signal.aborted) {
      try {
        for await (const { event, data } of sendForEvents("v1/live/events", { as: "admin", signal })) {
          if (signal.aborted) return;
          this.#awaitNext();
          this.#receive(event, JSON.parse(data));
        }
      } catch (error) {
        if (signal.aborted) return;
        clearTimeout(this.#timer); // there is no connection to watch
        this.#fail(error.isRefusal ? "refused" : "unavailable", error.status ? error.message : "the server does not answer");
        if (error.isRefusal) return; // until the tokens change
      }
      await new Promise((resolve) => setTimeout(resolve, RETRY_SECONDS * 1000));
    }
  }

  /** Connect again if no event comes for some time: a lost network need not end a connection. */
  #awaitNext() {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => {
      this.#restart();
      this.#fail("unavailable", "the server sends nothing");
    }, SILENT_SECONDS * 1000);
  }

  #fail(status, message) {
    Object.assign(this, { status, message });
    this.#notify();
  }

  #receive(event, data) {
    if (event === "unavailable") return this.#fail("unavailable", data.message);
    this.state = event === "snapshot" ? decodeStates(data) : applyChange(this.state, data);
    this.status = "open";
    this.message = "";
    const { created: time, totals, num_running, num_waiting } = this.state;
    const last = this.history.at(-1);
    if (last && (time < last.time || countTokens(totals) < countTokens(last.totals))) this.history = []; // another engine
    this.history.push({ time, totals, num_running, num_waiting });
    while (this.history[0].time < time - HISTORY_SECONDS) this.history.shift();
    this.#notify();
  }

  #notify() {
    for (const listener of [...this.#listeners]) listener();
  }
}

/** Return the number of tokens that an engine has handled since its start. */
const countTokens = (totals) =>
  Object.values(totals.instances).reduce((sum, each) => sum + each.prompt_tokens + each.generated_tokens, 0);

/** Decode the states of regions that are new, which are text. */
function decodeStates(state) {
  for (const region of Object.values(state.regions)) {
    if (typeof region.states === "string") region.states = decodeBytes(region.states);
  }
  return state;
}

function applyChange(state, { patch, states }) {
  const changed = decodeStates(applyMergePatch(state, patch));
  for (const [name, runs] of Object.entries(states)) {
    for (const [first, text] of runs) writeRun(changed.regions[name], first, decodeBytes(text));
  }
  return changed;
}

/** Replace states from `first` on, which may make them longer. */
function writeRun(region, first, run) {
  const end = first + run.length;
  if (end > region.states.length) {
    const before = region.states;
    region.states = new Uint8Array(end);
    region.states.set(before);
  }
  region.states.set(run, first);
}

export const live = new Live();

/** Return the live state's store; the component is drawn again after each change. */
export function useLive() {
  const [, redraw] = useReducer((count) => count + 1, 0);
  // A plain effect runs after the page is painted: a change between the drawing and the painting would be missed
  useLayoutEffect(() => live.subscribe(redraw), []);
  return live;
}
