/** The beginnings of texts that are cached, as a tree: their size, hits, age and pins; operators pin and drop them. */

import { ACTIONS_TITLE, html, Notice, ScrollTable, useConfirm, usePolled, useState } from "../components.js";
import { formatBytes, formatNumber, formatSeconds, showHidden } from "../format.js";

const POLL_SECONDS = 2;
const PIN_SECONDS = 3600;

export default function PrefixesView() {
  const { data, error, reload } = usePolled("v1/live/prefixes", { seconds: POLL_SECONDS, as: "admin" });
  const [dialog, ask] = useConfirm(reload);
  return html`<h2>Prefixes</h2>
    <p class="remark">A beginning that several texts share is computed once and kept. Hits: how often a later request found it. The texts themselves are
      not shown.</p>
    ${error && html`<${Notice} kind="error">${error.message}<//>`}
    ${data ? html`<${Instances} instances=${data.instances} ask=${ask} />` : !error && html`<${Notice}>Loading…<//>`}
    ${dialog}`;
}

function Instances({ instances, ask }) {
  const names = Object.keys(instances);
  const [chosen, setChosen] = useState(null);
  const name = names.includes(chosen) ? chosen : names[0];
  if (!name) return html`<p class="remark">No strategy of this server lists what it has cached.</p>`;
  const clear = () =>
    ask({
      title: `Clear ${name}?`,
      text: "Everything cached that no request uses is removed, and so are all pins. Later requests compute it again.",
      button: "Clear",
      path: `v1/kv_cache/${encodeURIComponent(name)}/clear`,
      body: {},
    });
  return html`
    <div class="fields">
      <label>Strategy<select value=${name} onChange=${(event) => setChosen(event.target.value)}>
        ${names.map((each) => html`<option key=${each}>${each}</option>`)}
      </select></label>
      <button type="button" onClick=${clear}>Clear all of ${name}</button>
    </div>
    <${Tree} key=${name} name=${name} list=${instances[name]} ask=${ask} />
  `;
}

/** Return the prefixes in the order of a tree, each with its depth; those with most hits first among siblings. */
export function orderTree(prefixes) {
  const children = new Map();
  for (const each of prefixes) {
    const key = each.parent ?? null;
    if (!children.has(key)) children.set(key, []);
    children.get(key).push(each);
  }
  for (const siblings of children.values()) siblings.sort((a, b) => b.hits - a.hits || b.bytes - a.bytes);
  const ordered = [];
  const stack = (children.get(null) ?? []).map((prefix) => ({ prefix, depth: 0 })).reverse();
  while (stack.length) {
    const node = stack.pop();
    const below = children.get(node.prefix.id) ?? [];
    ordered.push({ ...node, hasChildren: below.length > 0 });
    for (const prefix of [...below].reverse()) stack.push({ prefix, depth: node.depth + 1 });
  }
  return ordered;
}

function Tree({ name, list, ask }) {
  const [closed, setClosed] = useState(() => new Set());
  const toggle = (id) => {
    const changed = new Set(closed);
    if (!changed.delete(id)) changed.add(id);
    setClosed(changed);
  };
  const rows = [];
  let hiddenBelow = Infinity; // depth of the closed node whose descendants are left out
  for (const node of orderTree(list.prefixes)) {
    if (node.depth > hiddenBelow) continue;
    hiddenBelow = closed.has(node.prefix.id) ? node.depth : Infinity;
    rows.push(node);
  }
  if (!rows.length) return html`<p class="remark">Nothing is cached yet.</p>`;
  return html`
    <${ScrollTable} label=${`Prefixes of ${name}`} columns=${COLUMNS}>
      ${rows.map((node) => html`<${Row} key=${node.prefix.id} name=${name} node=${node} isClosed=${closed.has(node.prefix.id)} onToggle=${toggle} ask=${ask} />`)}
    <//>
    ${list.omitted > 0 && html`<p class="remark">${formatNumber(list.omitted)} more, the least used ones, are not listed.</p>`}
  `;
}

const COLUMNS = [
  ["prefix"],
  ...["from token", "tokens", "size", "in use by", "hits", "age", "idle for"].map((title) => [title, true]),
  ["tenant"],
  ["pins"],
  [ACTIONS_TITLE],
];

function Row({ name, node: { prefix, depth, hasChildren }, isClosed, onToggle, ask }) {
  const short = prefix.id.slice(0, 8);
  const base = `v1/kv_cache/${encodeURIComponent(name)}`;
  const pin = () =>
    ask({
      title: "Pin this prefix?",
      text: `Its ${formatNumber(prefix.first_token + prefix.tokens)} tokens, from the beginning of the text on, stay in memory for an hour.`,
      button: "Pin it",
      path: `${base}/pins`,
      body: { prefix: prefix.id, ttl: PIN_SECONDS },
    });
  const drop = () =>
    ask({
      title: "Drop this prefix?",
      text: "It and all that continues it are removed, pins included. What requests use stays until they end.",
      button: "Drop it",
      method: "DELETE",
      path: `${base}/prefixes/${prefix.id}`,
    });
  const unpin = (id) =>
    ask({
      title: "Unpin this prefix?",
      text: "It stays cached until its memory is needed.",
      button: "Unpin it",
      method: "DELETE",
      path: `${base}/pins/${id}`,
    });
  return html`<tr>
    <th scope="row" class="id" style=${{ paddingInlineStart: `${depth * 1.2 + 0.4}em` }}>
      ${hasChildren
        ? html`<button type="button" class="toggle" aria-expanded=${String(!isClosed)} aria-label=${`What continues ${short}`} onClick=${() => onToggle(prefix.id)}>${isClosed ? "▸" : "▾"}</button>`
        : html`<span class="toggle"></span>`}
      ${short}<span class="hidden">, level ${depth + 1}</span>
    </th>
    <td class="number">${formatNumber(prefix.first_token)}</td>
    <td class="number">${formatNumber(prefix.tokens)}</td>
    <td class="number">${formatBytes(prefix.bytes)}</td>
    <td class="number">${formatNumber(prefix.references)}</td>
    <td class="number">${formatNumber(prefix.hits)}</td>
    <td class="number">${formatSeconds(prefix.age_seconds)}</td>
    <td class="number">${prefix.idle_seconds === undefined ? "–" : formatSeconds(prefix.idle_seconds)}</td>
    <td class="id">${formatSalt(prefix)}</td>
    <td>${prefix.pins.map((id) => html`<button key=${id} type="button" aria-label=${`Unpin ${id} of ${short}`} onClick=${() => unpin(id)}>${id} ×</button>`)}</td>
    <td class="buttons">
      <button type="button" aria-label=${`Pin ${short}`} onClick=${pin}>Pin</button>
      <button type="button" aria-label=${`Drop ${short}`} onClick=${drop}>Drop</button>
    </td>
  </tr>`;
}

/** Return whose prefix it is: only requests of that tenant, with that salt, find it. */
function formatSalt({ tenant, cache_salt: salt, shadow }) {
  const shorten = (text) => showHidden([...text].slice(0, 12).join(""));
  return [tenant && shorten(tenant), salt && `salt ${shorten(salt)}`, shadow && "comparisons"].filter(Boolean).join(", ") || "–";
}
