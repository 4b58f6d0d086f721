/** The settings as they took effect, without secrets, and what each strategy instance promises. */

import { html, InstanceName, Notice, ScrollTable, usePolled, useState } from "../components.js";
import { formatBytes } from "../format.js";

export default function SettingsView() {
  const settings = usePolled("v1/settings");
  const caches = usePolled("v1/kv_cache");
  const error = settings.error ?? caches.error;
  return html`<h2>Settings</h2>
    ${error && html`<${Notice} kind="error">${error.message}<//>`}
    ${caches.data && html`<${Contracts} instances=${caches.data.data} />`}
    ${settings.data && html`<${SettingsTable} settings=${settings.data} />`}`;
}

function Contracts({ instances }) {
  const promises = [...new Set(instances.flatMap((each) => Object.keys(each.contract ?? {})))];
  return html`<section>
    <h3>Strategies</h3>
    <${ScrollTable} label="Strategies" columns=${["strategy", "kind", "state", "options", ...promises].map((name) => [name.replaceAll("_", " ")])}>
      ${instances.map(
        (each, index) => html`<tr key=${each.name}>
          <th scope="row"><${InstanceName} name=${each.name} index=${index} /></th>
          <td>${each.kind}</td>
          <td>${each.state}${each.reason && `: ${each.reason}`}</td>
          <td class="id">${each.options && formatOptions(each.options)}</td>
          ${promises.map((name) => html`<td key=${name}>${each.contract ? formatPromise(each.contract[name]) : ""}</td>`)}
        </tr>`,
      )}
    <//>
  </section>`;
}

const formatPromise = (value) => (value === true ? "yes" : value === false ? "no" : value === null ? "any" : String(value));

const formatOptions = (options) =>
  Object.entries(options)
    .filter(([, value]) => value !== null)
    .map(([name, value]) => `${name} = ${JSON.stringify(value)}`)
    .join(", ");

function SettingsTable({ settings }) {
  const [wanted, setWanted] = useState("");
  const rows = Object.entries(settings).filter(([name]) => name.includes(wanted.trim().toLowerCase().replaceAll("-", "_")));
  return html`<section>
    <h3>Settings in effect</h3>
    <label>Find<input type="search" value=${wanted} onInput=${(event) => setWanted(event.target.value)} /></label>
    <${ScrollTable} label="Settings in effect" kind="settings" columns=${[["setting"], ["value"]]}>
      ${rows.map(
        ([name, value]) => html`<tr key=${name}><th scope="row" class="id">${name}</th><td class="id">${formatValue(name, value)}</td></tr>`,
      )}
    <//>
    ${rows.length === 0 && html`<p class="remark">No setting has this in its name.</p>`}
  </section>`;
}

function formatValue(name, value) {
  if (value === null) return html`<span class="remark">none</span>`;
  if (typeof value === "object") return html`<pre>${JSON.stringify(value, null, 2)}</pre>`;
  return name.endsWith("_bytes") && typeof value === "number" ? `${value} (${formatBytes(value)})` : String(value);
}
