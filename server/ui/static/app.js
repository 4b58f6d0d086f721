/** The page: navigation by the fragment of its address, the access dialog, and the view that is shown. */

import { access, makeAddress, sendJson } from "./api.js";
import { Component, FormDialog, html, Notice, render, useEffect, useLayoutEffect, useRef, useState } from "./components.js";
import { useLive } from "./live.js";

// Each view is loaded when it is first opened
const VIEWS = [
  { name: "memory", title: "Memory", load: () => import("./views/memory.js") },
  { name: "compare", title: "Side by side", load: () => import("./views/compare.js") },
  { name: "prefixes", title: "Prefixes", load: () => import("./views/prefixes.js") },
  { name: "requests", title: "Requests", load: () => import("./views/requests.js") },
  { name: "rates", title: "Rates", load: () => import("./views/rates.js") },
  { name: "rollouts", title: "Roll-outs", load: () => import("./views/rollouts.js") },
  { name: "playground", title: "Playground", load: () => import("./views/playground.js") },
  { name: "settings", title: "Settings", load: () => import("./views/settings.js") },
];

/** Return the view and the parameters in the fragment of the address: #compare?prompt=... */
function readRoute() {
  const [name, query = ""] = location.hash.slice(1).split("?");
  return { view: VIEWS.find((view) => view.name === name) ?? VIEWS[0], params: new URLSearchParams(query) };
}

/** Show the error of a view that cannot be drawn, instead of an empty page. */
class ErrorBoundary extends Component {
  static getDerivedStateFromError(error) {
    return { error };
  }

  componentDidCatch(error) {
    console.error(error);
  }

  render({ children }, { error }) {
    if (!error) return children;
    return html`<${Notice} kind="error">This view cannot be shown (${String(error)}). Please report it.<//>`;
  }
}

function View({ view, params }) {
  const [loaded, setLoaded] = useState(null);
  const [error, setError] = useState(null);
  useEffect(() => {
    view.load().then((module) => setLoaded(() => module.default), setError);
  }, [view]);
  if (error) return html`<${Notice} kind="error">The view could not be loaded: ${error.message}<//>`;
  return loaded ? html`<${loaded} key=${params.toString()} params=${params} />` : html`<${Notice}>Loading…<//>`;
}

const STATUS = { open: "live", connecting: "connecting", unavailable: "no answer", refused: "no access" };

/** Show the model, and whether the live state arrives. */
function Status() {
  const { status } = useLive();
  const [model, setModel] = useState("");
  useEffect(() => {
    if (status !== "open" && status !== "refused") return;
    sendJson("ready").then((ready) => setModel(ready.model), () => {});
  }, [status]);
  return html`<p class="status">
    ${model && html`<span class="model">${model}</span>`}
    <span class=${`dot ${status}`} aria-hidden="true"></span><span role="status">${STATUS[status]}</span>
  </p>`;
}

/** Ask for the admin token and an API key. */
function AccessDialog({ onClose }) {
  const save = (data, close) => {
    access.set(Object.fromEntries(data));
    close();
  };
  const input = (name, title, note) => html`<label>
    ${title}
    <input type="password" name=${name} autocomplete="off" spellcheck="false" defaultValue=${access.get(name)} />
    <small>${note}</small>
  </label>`;
  return html`<${FormDialog} title="Access" button="Use" kind="primary" onSubmit=${save} onClose=${onClose}>
    ${input("admin", "Admin token", "the setting admin_token: for what shows or changes other clients' requests")}
    ${input("key", "API key", "one of the setting api_keys, if the server has any: for side by side and playground")}
    <p>Both are kept in this tab only, and sent to ${new URL(makeAddress("")).host} only.</p>
  <//>`;
}

function App() {
  const [{ view, params }, setRoute] = useState(readRoute);
  const [asking, setAsking] = useState(false);
  const main = useRef();
  useLayoutEffect(() => {
    const follow = () => setRoute(readRoute());
    addEventListener("hashchange", follow);
    return () => removeEventListener("hashchange", follow);
  }, []);
  useEffect(() => {
    document.title = `${view.title} – kvmux`;
  }, [view]);
  const skip = (event) => {
    event.preventDefault(); // the fragment of the address names the view
    main.current.focus();
  };
  return html`
    <a class="skip" href="#main" onClick=${skip}>Skip to the view</a>
    <header>
      <h1><img src="icon.svg" alt="" width="20" height="20" /> kvmux</h1>
      <nav aria-label="Views">
        ${VIEWS.map(
          (each) => html`<a key=${each.name} href=${`#${each.name}`} aria-current=${each === view ? "page" : null}>${each.title}</a>`,
        )}
      </nav>
      <${Status} />
      <button type="button" onClick=${() => setAsking(true)}>Access</button>
    </header>
    <main ref=${main} tabindex="-1">
      <${ErrorBoundary} key=${view.name}><${View} view=${view} params=${params} /><//>
    </main>
    ${asking && html`<${AccessDialog} onClose=${() => setAsking(false)} />`}
  `;
}

const root = document.getElementById("app");
root.replaceChildren();
render(html`<${App} />`, root);
