/**
 * One prompt under two to four strategies at once: their texts side by side, with the distance of each token from what
 * the first strategy, the reference, predicts at that place; below them what each has cost.
 *
 * The fragment of the page's address has everything that a run needs, so that a link repeats it. Fragments stay in the
 * browser: the prompt is in no request but those of the run.
 */

import { sendForChunks, sendJson } from "../api.js";
import { colorClass, CopyButton, Figure, html, InstanceName, Notice, usePolled, useRef, useRun, useState } from "../components.js";
import { formatBytes, formatNumber, formatPercent, formatSeconds, showHidden } from "../format.js";

const MAX_COLUMNS = 4;
// A fact, more than a thousand tokens of something else, and a question for the fact: what windows and evictions lose
const FACT = "Hilda put the silver violin in the tower.";
const STORY =
  " The sun was warm, and the birds sang in the tall trees. A small dog ran along the river and looked for its ball. " +
  "Later it began to rain, so all went home and had some soup.";
const QUESTION = " Where does Hilda keep the silver violin? Hilda keeps the silver violin in the";
const EXAMPLE = FACT + STORY.repeat(32) + QUESTION;

// The lower bounds of the classes 1 to 4; class 0 is what lies below
const SCALES = {
  kl: { title: "KL divergence", unit: "nats", bounds: [0.01, 0.1, 0.5, 2], value: (found) => found.kl },
  rank: { title: "rank", unit: "", bounds: [2, 3, 6, 21], value: (found) => found.rank },
};

const DEFAULTS = { max_tokens: "64", temperature: "0", seed: "", chat: "", color: "kl" };

export default function CompareView({ params }) {
  const { data, error } = usePolled("v1/kv_cache");
  if (error) return html`<h2>Side by side</h2><${Notice} kind="error">${error.message}<//>`;
  if (data === null) return html`<h2>Side by side</h2><${Notice}>Loading…<//>`;
  const instances = data.data.filter((each) => each.state !== "disabled");
  return html`<h2>Side by side</h2><${Comparison} instances=${instances} params=${params} />`;
}

/** Return the instances to compare at first: an exact one as the reference, then those that differ from it. */
function chooseInstances(instances, params) {
  const names = instances.map((each) => each.name);
  const linked = [...new Set((params.get("in") ?? "").split(","))].filter((name) => names.includes(name));
  if (linked.length > 1) return linked.slice(0, MAX_COLUMNS);
  const exact = instances.filter((each) => each.contract.exact).map((each) => each.name);
  const isOwn = (each) => Number(each.name !== each.kind); // declared in the settings, so more likely to be of interest
  const lossy = instances.filter((each) => !each.contract.exact).sort((a, b) => isOwn(b) - isOwn(a)).map((each) => each.name);
  return [...exact.slice(0, 1), ...lossy, ...exact.slice(1)].slice(0, lossy.length ? 3 : 2);
}

/** Return the form's fields from the fragment of the address, which somebody else may have written. */
function readForm(params) {
  const fields = Object.entries({ prompt: EXAMPLE, ...DEFAULTS }).map(([name, value]) => [name, params.get(name) ?? value]);
  const form = Object.fromEntries(fields);
  return { ...form, color: Object.hasOwn(SCALES, form.color) || form.color === "none" ? form.color : DEFAULTS.color };
}

function Comparison({ instances, params }) {
  const [form, setForm] = useState(() => readForm(params));
  const [chosen, setChosen] = useState(() => chooseInstances(instances, params));
  const { columns, running, error, start, stop } = useComparison();
  const change = (name) => (event) => {
    const { type, checked, value } = event.target;
    setForm({ ...form, [name]: type === "checkbox" ? (checked ? "1" : "") : value });
  };
  const submit = (event) => {
    event.preventDefault();
    const settings = { ...form, seed: form.seed || String(Math.floor(Math.random() * 2 ** 31)) };
    setForm(settings);
    history.replaceState(null, "", makeLink(settings, chosen));
    start(settings, chosen);
  };
  return html`
    <form class="panel" onSubmit=${submit}>
      <label class="wide">Prompt<textarea rows="4" required value=${form.prompt} onInput=${change("prompt")}></textarea></label>
      <${InstanceChoice} instances=${instances} chosen=${chosen} onChange=${setChosen} />
      <div class="fields">
        <label>Max tokens<input type="number" min="1" value=${form.max_tokens} onInput=${change("max_tokens")} /></label>
        <label>Temperature<input type="number" min="0" max="2" step="any" value=${form.temperature} onInput=${change("temperature")} /></label>
        <label>Seed<input type="number" min="0" max=${Number.MAX_SAFE_INTEGER} placeholder="random" value=${form.seed} onInput=${change("seed")} /></label>
        <label class="check"><input type="checkbox" checked=${form.chat === "1"} onChange=${change("chat")} />as a chat, by the model's template</label>
      </div>
      <p class="buttons">
        ${running ? html`<button type="button" onClick=${stop}>Stop</button>` : html`<button class="primary" disabled=${chosen.length < 2}>Run</button>`}
        <${CopyButton} text=${() => new URL(makeLink(form, chosen), location.href).href}>Copy link<//>
        <span class="remark">
          All run in the same batch. The first is the reference of the colours.
          ${form.prompt === EXAMPLE && " The example asks at its end for a fact at its beginning."}
        </span>
      </p>
      ${error && html`<${Notice} kind="error">${error}<//>`}
    </form>
    ${columns.length > 0 && html`<${Results} columns=${columns} color=${form.color} onColor=${change("color")} names=${instances.map((each) => each.name)} />`}
  `;
}

const makeLink = (form, chosen) => `#compare?${new URLSearchParams({ ...form, in: chosen.join(",") })}`;

function InstanceChoice({ instances, chosen, onChange }) {
  const replace = (index, name) => onChange(chosen.map((each, i) => (i === index ? name : each)));
  const unused = instances.filter((each) => !chosen.includes(each.name));
  return html`<fieldset class="choice">
    <legend>Strategies</legend>
    ${chosen.map(
      (name, index) => html`<span key=${index}>
        <select aria-label=${index ? `Strategy ${index + 1}` : "Reference"} value=${name} onChange=${(event) => replace(index, event.target.value)}>
          ${instances.map(
            (each) => html`<option key=${each.name} value=${each.name} disabled=${each.name !== name && chosen.includes(each.name)}>
              ${each.name}${each.contract.exact ? " (exact)" : ""}
            </option>`,
          )}
        </select>
        ${chosen.length > 2 &&
        html`<button type="button" aria-label=${`Remove ${name}`} onClick=${() => onChange(chosen.filter((each) => each !== name))}>×</button>`}
      </span>`,
    )}
    ${chosen.length < MAX_COLUMNS &&
    unused.length > 0 &&
    html`<button type="button" onClick=${() => onChange([...chosen, unused[0].name])}>Add</button>`}
    ${chosen.length < 2 && html`<span class="remark">This server has one strategy only; its settings can have more.</span>`}
  </fieldset>`;
}

// ---------------------------------------------------------------- the run
/** Return the columns of the latest run, and functions to start and stop one. */
function useComparison() {
  const { running, redraw, start, stop } = useRun();
  const [error, setError] = useState("");
  const columns = useRef([]);
  const compare = (form, chosen) =>
    start(async (signal) => {
      setError("");
      columns.current = chosen.map((name) => ({ name, tokens: [], compared: [], began: performance.now() }));
      try {
        const body = await makeBody(form, signal);
        const runs = columns.current.map((column, index) => {
          const reference = index ? { kv_cache_reference: chosen[0] } : {};
          return runColumn(column, { ...body, kv_cache: column.name, ...reference }, signal, redraw);
        });
        await Promise.all(runs);
      } catch (failure) {
        setError(signal.aborted ? "Stopped." : failure.message);
      }
    });
  return { columns: columns.current, running, error, start: compare, stop };
}

/** Return the body that all requests of a run have in common. */
async function makeBody(form, signal) {
  const body = {
    prompt: form.prompt,
    max_tokens: Number(form.max_tokens),
    temperature: Number(form.temperature),
    seed: Number(form.seed),
    logprobs: 0, // for the text of each token
    return_token_ids: true,
    explain: true,
    kv_cache_rollout: false,
    stream: true,
  };
  if (form.chat !== "1") return body;
  const messages = [{ role: "user", content: form.prompt }];
  const { prompt } = await sendJson("apply-template", { method: "POST", body: { messages }, signal });
  return { ...body, prompt, add_special_tokens: false };
}

/** Run one column; its error is shown in the column, and the others go on. */
async function runColumn(column, body, signal, redraw) {
  column.began = performance.now();
  try {
    for await (const chunk of sendForChunks("v1/completions", body, signal)) {
      if (chunk.kv_cache) column.served = chunk.kv_cache;
      for (const choice of chunk.choices) addChoice(column, choice);
      redraw();
    }
  } catch (failure) {
    column.error = signal.aborted ? "stopped" : failure.message;
  }
  column.ended = true;
  redraw();
}

function addChoice(column, choice) {
  const now = performance.now();
  const ids = choice.token_ids ?? [];
  const offsets = choice.logprobs?.text_offset ?? [];
  ids.forEach((id, i) => {
    const text = choice.text.slice(offsets[i] - offsets[0], i + 1 < ids.length ? offsets[i + 1] - offsets[0] : undefined);
    column.tokens.push({ id, text, logprob: choice.logprobs?.token_logprobs[i] });
  });
  if (ids.length) {
    column.firstAt ??= now;
    column.lastAt = now;
  }
  const compared = choice.kv_cache_comparison;
  compared?.indexes.forEach((index, i) => {
    // A comparison may come before its token
    column.compared[index] = { kl: compared.kl[i], top1: compared.top1[i], rank: compared.rank[i] };
  });
  if (compared?.ended_early) column.endedEarly = compared.ended_early;
  if (choice.kv_cache) column.explanation = choice.kv_cache;
  if (choice.finish_reason) column.finishReason = choice.finish_reason;
}

// ---------------------------------------------------------------- results
function Results({ columns, color, onColor, names }) {
  return html`<section aria-label="Results">
    <fieldset class="choice">
      <legend>Colour tokens by</legend>
      ${Object.entries(SCALES).map(
        ([name, scale]) => html`<label key=${name} class="check"><input type="radio" name="color" value=${name} checked=${color === name} onChange=${onColor} />${scale.title}</label>`,
      )}
      <label class="check"><input type="radio" name="color" value="none" checked=${color === "none"} onChange=${onColor} />nothing</label>
      ${SCALES[color] && html`<${Legend} scale=${SCALES[color]} reference=${columns[0].name} />`}
    </fieldset>
    <div class="columns">
      ${columns.map((column, index) => {
        const reference = index ? columns[0] : null;
        return html`<${Column} key=${column.name} column=${column} reference=${reference} color=${color} colorIndex=${names.indexOf(column.name)} />`;
      })}
    </div>
  </section>`;
}

function Legend({ scale, reference }) {
  const { bounds, unit } = scale;
  const labels = [`below ${bounds[0]}`, ...bounds.map((bound) => `from ${bound}`)];
  return html`<ul class="legend" aria-label=${`${scale.title} against ${reference} ${unit}`}>
    ${labels.map((label, i) => html`<li key=${label}><span class=${`token k${i}`}>${label}</span></li>`)}
    ${unit && html`<li>${unit}</li>`}
  </ul>`;
}

/** Return the index of the first token that differs from the reference's text; null if there is none so far. */
export function findFirstDifference(column, reference) {
  const count = Math.min(column.tokens.length, reference.tokens.length);
  for (let i = 0; i < count; i += 1) {
    if (column.tokens[i].id !== reference.tokens[i].id) return i;
  }
  const bothEnded = column.ended && reference.ended;
  return bothEnded && column.tokens.length !== reference.tokens.length ? count : null;
}

function Column({ column, reference, color, colorIndex }) {
  const [selected, setSelected] = useState(null);
  const difference = reference && findFirstDifference(column, reference);
  return html`<article class=${`column ${colorClass(colorIndex)}`} aria-label=${column.name} aria-busy=${!column.ended}>
    <h3><${InstanceName} name=${column.name} index=${colorIndex} />${!reference && html` <small>reference</small>`}</h3>
    <${TokenText} column=${column} difference=${difference} color=${reference ? color : "none"} selected=${selected} onSelect=${setSelected} />
    <p class="details" aria-live="polite">${describeToken(column, selected, difference, reference)}</p>
    ${column.error && html`<${Notice} kind="error">${column.error}<//>`}
    ${column.served && column.served.instance !== column.name && html`<${Notice} kind="error">Served by ${column.served.instance}, its fallback.<//>`}
    <${Costs} column=${column} reference=${reference} difference=${difference} />
  </article>`;
}

/** Return the class with the colour of a compared token; `found` is undefined for others. */
const classOf = (found, scale) =>
  found && scale ? `k${scale.bounds.filter((bound) => scale.value(found) >= bound).length}` : "";

/** Show a text as tokens; the arrow keys go from token to token. */
function TokenText({ column, difference, color, selected, onSelect }) {
  const move = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step || !column.tokens.length) return;
    event.preventDefault();
    onSelect(Math.min(column.tokens.length - 1, Math.max(0, (selected ?? -step) + step)));
  };
  const select = (event) => {
    const index = event.target.dataset?.index;
    if (index !== undefined) onSelect(Number(index));
  };
  return html`<div class="text" tabindex="0" role="group" aria-label=${`Text of ${column.name}`} onKeyDown=${move} onPointerOver=${select} onClick=${select}>
    ${column.tokens.map((token, i) => {
      const classes = `token ${classOf(column.compared[i], SCALES[color])} ${i === difference ? "first-difference" : ""} ${i === selected ? "selected" : ""}`;
      return html`<span key=${i} class=${classes} data-index=${i}>${showHidden(token.text)}</span>`;
    })}
    ${!column.tokens.length && html`<span class="remark">${column.ended ? "no text" : "…"}</span>`}
  </div>`;
}

function describeToken(column, index, difference, reference) {
  const token = column.tokens[index];
  if (!token) return "Select a token for its figures.";
  const parts = [`token ${index + 1}: “${showHidden(token.text)}” (id ${token.id})`];
  if (token.logprob != null) parts.push(`probability ${formatPercent(Math.exp(token.logprob))}`);
  const found = column.compared[index];
  if (found) {
    parts.push(`KL ${formatNumber(found.kl)} nats`, `rank ${found.rank} under ${reference.name}`);
    parts.push(found.top1 ? "same likeliest token" : "another token is likeliest there");
  } else if (reference) {
    parts.push("not compared");
  }
  if (index === difference) parts.push("the first token that differs from the reference's");
  return parts.join(" · ");
}

function Costs({ column, reference, difference }) {
  const { explanation, tokens } = column;
  const other = reference?.explanation;
  const seconds = column.lastAt > column.firstAt ? (column.lastAt - column.firstAt) / 1000 : null;
  const compared = column.compared.filter(Boolean);
  const mean = (value) => compared.reduce((sum, found) => sum + value(found), 0) / compared.length;
  const relative = (name) => (explanation && other?.[name] ? `${formatNumber(explanation[name] / other[name], 2)} × reference` : null);
  return html`<dl class="figures">
    <${Figure} title="KV memory" note=${relative("peak_kv_bytes")}>${formatBytes(explanation?.peak_kv_bytes)}<//>
    <${Figure} title="tokens kept" note=${explanation ? `${formatNumber(explanation.dropped_tokens)} dropped` : null}>${formatNumber(explanation?.kept_tokens)}<//>
    <${Figure} title="first token" note=${column.served ? `${formatNumber(column.served.cached_tokens)} tokens cached` : null}>${column.firstAt ? formatSeconds((column.firstAt - column.began) / 1000) : "–"}<//>
    <${Figure} title="tokens a second" note=${`${formatNumber(tokens.length)} tokens${column.finishReason ? `, ${column.finishReason}` : ""}`}>${seconds ? formatNumber((tokens.length - 1) / seconds) : "–"}<//>
    ${reference &&
    html`<${Figure} title="mean KL, nats" note=${`${formatNumber(compared.length)} tokens compared${column.endedEarly ? `, ended early: ${column.endedEarly}` : ""}`}>${compared.length ? formatNumber(mean((found) => found.kl)) : "–"}<//>
      <${Figure} title="same likeliest token">${compared.length ? formatPercent(mean((found) => Number(found.top1))) : "–"}<//>
      <${Figure} title="first difference">${difference === null ? (column.ended ? "none" : "none yet") : `at token ${difference + 1}`}<//>`}
  </dl>`;
}
