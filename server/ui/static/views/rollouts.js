/** Roll-outs: their state, what the guard has measured, and buttons to pause, resume, advance and abort them. */

import { Figure, html, Notice, ScrollTable, useConfirm, usePolled } from "../components.js";
import { formatBytes, formatNumber, formatPercent, formatSeconds } from "../format.js";

const POLL_SECONDS = 2;
const ACTIVE = ["shadow", "canary"];

export default function RolloutsView() {
  const rollouts = usePolled("v1/rollouts", { seconds: POLL_SECONDS });
  const fidelity = usePolled("v1/fidelity", { seconds: POLL_SECONDS });
  const [dialog, ask] = useConfirm(rollouts.reload);
  return html`<h2>Roll-outs</h2>
    ${rollouts.error && html`<${Notice} kind="error">${rollouts.error.message}<//>`}
    ${rollouts.data?.data.length === 0 &&
    html`<p class="remark">There are none. A roll-out moves requests from one strategy to another in steps, and back by itself if a bound is
      exceeded: a table [rollouts.NAME] in the settings, or POST /v1/rollouts.</p>`}
    ${rollouts.data?.data.map((each) => html`<${Rollout} key=${each.name} rollout=${each} ask=${ask} />`)}
    ${fidelity.data?.data.length > 0 && html`<${Fidelity} pairs=${fidelity.data.data} confidence=${fidelity.data.confidence} />`}
    ${dialog}`;
}

const ACTIONS = [
  { name: "pause", title: "Pause", isFor: (each) => !each.paused, text: "It keeps its share until it is resumed; the guard may still roll it back." },
  { name: "resume", title: "Resume", isFor: (each) => each.paused, text: "It goes on from where it was paused." },
  { name: "advance", title: "Advance", isFor: () => true, text: "The next stage begins now, without waiting for time and requests." },
  { name: "abort", title: "Abort", isFor: () => true, text: "All new requests go to the present strategy again." },
];

function Rollout({ rollout, ask }) {
  const { settings, name } = rollout;
  const isActive = ACTIVE.includes(rollout.state);
  const start = (action) =>
    ask({
      title: `${action.title} ${name}?`,
      text: action.text,
      button: action.title,
      path: `v1/rollouts/${encodeURIComponent(name)}/${action.name}`,
    });
  return html`<section class="panel">
    <h3>${name}: ${settings.from} → ${settings.to}</h3>
    <dl class="figures">
      <${Figure} title="state" note=${rollout.paused ? "paused" : null}>${rollout.state.replaceAll("_", " ")}<//>
      <${Figure} title="stage">${rollout.stage === null ? "–" : `${rollout.stage} of ${rollout.stages}`}<//>
      <${Figure} title=${`served by ${settings.to}`}>${formatPercent(rollout.share)}<//>
      <${Figure} title="in this state for">${formatSeconds(rollout.elapsed_seconds)}<//>
      <${Figure} title="mean KL, nats" note=${`${formatNumber(rollout.fidelity.tokens)} tokens of ${formatNumber(rollout.fidelity.requests)} requests`}>${formatEstimate(rollout.fidelity.kl_mean)}<//>
      <${Figure} title="guard" note=${rollout.verdict.reason}>${rollout.verdict.outcome}<//>
    </dl>
    ${rollout.reason && html`<p>${rollout.reason}</p>`}
    <${Guards} guards=${rollout.guards} name=${name} />
    ${isActive &&
    html`<p class="buttons">
      ${ACTIONS.filter((action) => action.isFor(rollout)).map(
        (action) => html`<button key=${action.name} type="button" class=${action.name === "abort" ? "danger" : ""} onClick=${() => start(action)}>${action.title}</button>`,
      )}
    </p>`}
    <${History} history=${rollout.history} />
  </section>`;
}

function Guards({ guards, name }) {
  if (!guards.length) return null;
  return html`<${ScrollTable} label=${`Guard of ${name}`} columns=${[["guard"], ["verdict"], ["reason"]]}>
    ${guards.map(
      (each) => html`<tr key=${each.guard}>
        <th scope="row" class="id">${each.guard}</th>
        <td class=${each.verdict === "tripped" ? "bad" : ""}>${each.verdict}</td>
        <td>${each.text}</td>
      </tr>`,
    )}
  <//>`;
}

function History({ history }) {
  if (!history.length) return null;
  return html`<details>
    <summary>History (${history.length})</summary>
    <ol class="history">
      ${[...history].reverse().map(
        (each, i) => html`<li key=${i}><time>${new Date(each.time * 1000).toLocaleString()}</time> ${each.from} → ${each.to}: ${each.reason}${each.by && ` (${each.by})`}</li>`,
      )}
    </ol>
  </details>`;
}

/** Return an estimate with its interval. */
function formatEstimate(estimate) {
  if (estimate?.value == null) return "–";
  const end = (value) => (value == null ? "?" : formatNumber(value));
  return `${formatNumber(estimate.value)} (${end(estimate.low)} to ${end(estimate.high)})`;
}

const FIDELITY_COLUMNS = [
  ["served by"],
  ["compared with"],
  ["requests", true],
  ["tokens", true],
  ["mean KL, nats", true],
  ["KL, 99th percentile", true],
  ["same likeliest token", true],
  ["saved per request", true],
];

function Fidelity({ pairs, confidence }) {
  return html`<section>
    <h3>Fidelity since the start</h3>
    <p class="remark">With intervals of ${formatPercent(confidence)}.</p>
    <${ScrollTable} label="Fidelity since the start" columns=${FIDELITY_COLUMNS}>
      ${pairs.map(
        (each) => html`<tr key=${`${each.served}/${each.candidate}`}>
          <th scope="row">${each.served}</th><td>${each.candidate}</td>
          <td class="number">${formatNumber(each.requests)}</td><td class="number">${formatNumber(each.tokens)}</td>
          <td class="number">${formatEstimate(each.kl_mean)}</td><td class="number">${formatEstimate(each.kl_p99)}</td>
          <td class="number">${formatEstimate(each.top1)}</td><td class="number">${formatBytes(each.bytes_saved_per_request)}</td>
        </tr>`,
      )}
    <//>
  </section>`;
}
