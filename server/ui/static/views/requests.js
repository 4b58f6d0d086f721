/** The running and waiting requests: how far each is, under which strategy and why; an operator can end one. */

import { ACTIONS_TITLE, html, InstanceName, ScrollTable, useConfirm, useState, WithLive } from "../components.js";
import { formatNumber, formatSeconds, showHidden } from "../format.js";

const ROWS_SHOWN = 50; // at once

export default function RequestsView() {
  const [dialog, confirm] = useConfirm();
  return html`<h2>Requests</h2>
    <${WithLive}>${(state) => html`<${Requests} state=${state} onEnd=${confirm} />`}<//>
    ${dialog}`;
}

function Requests({ state, onEnd }) {
  const names = Object.keys(state.instances);
  const [filter, setFilter] = useState({ instance: "", state: "" });
  const [first, setFirst] = useState(0);
  const found = Object.entries(state.requests).filter(
    ([, each]) => (!filter.instance || each.instance === filter.instance) && (!filter.state || each.state === filter.state),
  );
  const start = first < found.length ? first : 0;
  const choose = (name) => (event) => setFilter({ ...filter, [name]: event.target.value });
  const ask = (key, request) =>
    onEnd({
      title: "End this request?",
      text: `${showHidden(request.id)} under ${request.instance}: its client gets an error, and its memory is freed at once.`,
      button: "End it",
      method: "DELETE",
      path: `v1/live/requests/${encodeURIComponent(key).replace("%2F", "/")}`,
    });
  return html`
    <div class="fields">
      <label>Strategy<select value=${filter.instance} onChange=${choose("instance")}>
        <option value="">all</option>${names.map((name) => html`<option key=${name}>${name}</option>`)}
      </select></label>
      <label>State<select value=${filter.state} onChange=${choose("state")}>
        <option value="">all</option><option>running</option><option>waiting</option>
      </select></label>
      <p class="count">${formatNumber(state.num_running)} running of at most ${formatNumber(state.max_num_seqs)}, ${formatNumber(state.num_waiting)} waiting</p>
    </div>
    ${found.length === 0
      ? html`<p class="remark">No requests.</p>`
      : html`<${Table} rows=${found.slice(start, start + ROWS_SHOWN)} names=${names} onEnd=${ask} />
          <${Pager} start=${start} count=${found.length} listed=${Object.keys(state.requests).length} all=${state.num_running + state.num_waiting} onChange=${setFirst} />`}
  `;
}

function Pager({ start, count, listed, all, onChange }) {
  return html`<p class="buttons">
    ${count > ROWS_SHOWN &&
    html`<button type="button" disabled=${start === 0} onClick=${() => onChange(start - ROWS_SHOWN)}>Previous</button>
      <button type="button" disabled=${start + ROWS_SHOWN >= count} onClick=${() => onChange(start + ROWS_SHOWN)}>Next</button>
      <span>${formatNumber(start + 1)} to ${formatNumber(Math.min(start + ROWS_SHOWN, count))} of ${formatNumber(count)}</span>`}
    ${all > listed && html`<span class="remark">${formatNumber(all - listed)} more requests are not listed.</span>`}
  </p>`;
}

function Table({ rows, names, onEnd }) {
  return html`<${ScrollTable} label="Requests" columns=${COLUMNS}>
    ${rows.map(([key, request]) => {
      const cached = request.cached_tokens ?? 0;
      const prompt = Math.min(request.computed_tokens, request.prompt_tokens);
      return html`<tr key=${key}>
        <th scope="row" class="id" title=${showHidden(request.id)}>${showHidden(request.id.slice(0, 12))}</th>
        <td>${request.state}${request.priority ? `, priority ${request.priority}` : ""}</td>
        <td><${InstanceName} name=${request.instance} index=${names.indexOf(request.instance)} /></td>
        <td>${request.reason}</td>
        <td>
          <progress max=${request.prompt_tokens} value=${prompt} aria-label=${`prompt of ${request.id}`}></progress>
          ${formatNumber(prompt)} of ${formatNumber(request.prompt_tokens)}
        </td>
        <td class="number">${formatNumber(cached)}</td>
        <td class="number">${formatNumber(Math.max(0, prompt - cached))}</td>
        <td class="number">${formatNumber(request.generated_tokens)} of ${formatNumber(request.max_tokens)}</td>
        <td class="number">${formatSeconds(request.time_to_first_token)}</td>
        <td class="number">${formatSeconds(request.seconds)}</td>
        <td class="number">${formatNumber(request.preemptions)}</td>
        <td><button type="button" aria-label=${`End ${request.id}`} onClick=${() => onEnd(key, request)}>End</button></td>
      </tr>`;
    })}
  <//>`;
}

const COLUMNS = [
  ["request"],
  ["state"],
  ["strategy"],
  ["why"],
  ["prompt"],
  ...["cached", "computed", "generated", "first token", "age", "preempted"].map((title) => [title, true]),
  [ACTIONS_TITLE],
];
