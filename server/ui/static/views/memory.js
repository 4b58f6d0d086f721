/** The KV memory: what it is used for, how much more has room, and the blocks of each region by their state. */

import { sendJson } from "../api.js";
import { Bar, colorClass, Figure, html, InstanceName, NUM_COLORS, ScrollTable, useEffect, useLayoutEffect, useRef, useState, WithLive } from "../components.js";
import { formatBytes, formatNumber, formatSeconds } from "../format.js";

const STATE_TITLES = {
  in_use: "in use, by one sequence",
  shared: "shared by several sequences",
  pinned: "pinned",
  pending: "being computed, and others wait for it",
  idle: "idle: kept for reuse, freed when needed",
  free: "free",
};
const HOVER_DELAY = 120; // milliseconds for which the pointer rests on a block before its details are asked for

export default function MemoryView() {
  return html`<h2>Memory</h2><${WithLive}>${(state) => html`<${Memory} state=${state} />`}<//>`;
}

function Memory({ state }) {
  const names = Object.keys(state.instances);
  return html`
    <${Overview} state=${state} />
    <${Instances} state=${state} names=${names} />
    <${Room} state=${state} names=${names} />
    <${Regions} state=${state} names=${names} />
  `;
}

/** Return the sum of one kind of memory over all instances. */
const sumUsage = (state, kind) => Object.values(state.instances).reduce((sum, each) => sum + each.usage[kind], 0);

function Overview({ state }) {
  const { memory } = state;
  const used = sumUsage(state, "used");
  const idle = sumUsage(state, "idle");
  const wasted = sumUsage(state, "wasted");
  const free = Math.max(0, memory.bytes - used - idle - wasted);
  const parts = [
    { label: "weights", value: memory.weight_bytes, kind: "weights" },
    { label: "used", value: used, kind: "used" },
    { label: "idle", value: idle, kind: "idle" },
    { label: "wasted", value: wasted, kind: "wasted" },
    { label: "free", value: free, kind: "free" },
  ];
  const label = parts.map((part) => `${part.label} ${formatBytes(part.value)}`).join(", ");
  return html`<section aria-label="Memory by use">
    <${Bar} parts=${parts} total=${memory.weight_bytes + memory.bytes} label=${`Weights and KV memory: ${label}`} />
    <dl class="figures">
      ${parts.map((part) => html`<${Figure} key=${part.label} title=${html`<i class=${`swatch ${part.kind}`}></i>${part.label}`}>${formatBytes(part.value)}<//>`)}
      <${Figure} title="KV memory" note=${memory.warm_bytes < memory.bytes ? `${formatBytes(memory.warm_bytes)} provided by the system so far` : null}>${formatBytes(memory.bytes)}<//>
      <${Figure} title="requests">${formatNumber(state.num_running)} running, ${formatNumber(state.num_waiting)} waiting<//>
    </dl>
  </section>`;
}

function Instances({ state, names }) {
  return html`<section>
    <h3>By strategy</h3>
    <${ScrollTable} label="Memory by strategy" columns=${INSTANCE_COLUMNS}>
      ${names.map((name, index) => html`<${Instance} key=${name} name=${name} index=${index} instance=${state.instances[name]} />`)}
    <//>
  </section>`;
}

const INSTANCE_COLUMNS = [
  ["strategy"],
  ["kind"],
  ["of its limit"],
  ...["used", "idle", "wasted", "floor", "limit", "tokens kept", "dropped", "running", "waiting"].map((title) => [title, true]),
];

function Instance({ name, index, instance }) {
  const { used, idle, wasted } = instance.usage;
  const { floor_bytes: floor, limit_bytes: limit } = instance;
  const parts = [
    { label: "used", value: used, kind: "solid", color: colorClass(index) },
    { label: "idle", value: idle, kind: "faint", color: colorClass(index) },
    { label: "wasted", value: wasted, kind: "wasted" },
  ];
  const marks = floor ? [{ label: `floor ${formatBytes(floor)}`, value: floor, kind: "floor" }] : [];
  const label = `${formatBytes(used)} used and ${formatBytes(idle)} idle of ${formatBytes(limit)}`;
  return html`<tr>
    <th scope="row">
      <${InstanceName} name=${name} index=${index} />${instance.state !== "ok" && html` <strong class="bad">${instance.state}</strong>`}
    </th>
    <td>${instance.kind}</td>
    <td><${Bar} parts=${parts} marks=${marks} total=${limit} label=${label} /></td>
    ${[used, idle, wasted, floor, limit].map((bytes) => html`<td class="number">${formatBytes(bytes)}</td>`)}
    ${["kept_tokens", "dropped_tokens", "running", "waiting"].map((field) => html`<td class="number">${formatNumber(instance[field])}</td>`)}
  </tr>`;
}

/** Show how many more texts of a length fit, by strategy. */
function Room({ state, names }) {
  const lengths = [...new Set(names.flatMap((name) => Object.keys(state.instances[name].fits).map(Number)))].sort((a, b) => a - b);
  const [chosen, setChosen] = useState(null);
  if (!lengths.length) return null;
  const index = chosen ?? Math.min(2, lengths.length - 1);
  const length = lengths[Math.min(index, lengths.length - 1)];
  const most = Math.max(1, ...names.map((name) => state.instances[name].fits[length] ?? 0));
  return html`<section>
    <h3>Room for more</h3>
    <label class="slider">
      Texts of <output>${formatNumber(length)}</output> tokens
      <input type="range" min="0" max=${lengths.length - 1} value=${index} aria-valuetext=${`${length} tokens`} onInput=${(event) => setChosen(Number(event.target.value))} />
    </label>
    <dl class="room">
      ${names.map((name, i) => {
        const count = state.instances[name].fits[length];
        return html`<div key=${name}>
          <dt><${InstanceName} name=${name} index=${i} /></dt>
          <dd>
            <b>${formatNumber(count)}</b> more
            <${Bar} parts=${[{ label: name, value: count ?? 0, kind: "solid", color: colorClass(i) }]} total=${most} label=${`${count ?? "unknown"} more texts of ${length} tokens fit`} />
          </dd>
        </div>`;
      })}
    </dl>
    <p class="remark">If idle memory is freed, nothing is shared, and no other strategy takes the room.</p>
  </section>`;
}

// ---------------------------------------------------------------- the blocks of each region
function Regions({ state, names }) {
  const [selected, setSelected] = useState({}); // {key, index} of a region and a cell of it
  return html`<section>
    <h3>Blocks</h3>
    <p class="remark">Each square is a block of memory. Point at one, or go there with the arrow keys, for its details.</p>
    <ul class="legend" aria-label="Colours and marks">
      ${names.map((name, index) => html`<li key=${name}><${InstanceName} name=${name} index=${index} /></li>`)}
      ${Object.entries(STATE_TITLES).map(([name, title]) => html`<li key=${name}><i class=${`cell ${name}`}></i>${title}</li>`)}
    </ul>
    ${Object.entries(state.regions).map(([key, region], number) => {
      const index = selected.key === key ? selected.index : null;
      const select = (cell) => setSelected({ key, index: cell });
      return html`<${Strip} key=${key} number=${number} region=${region} stateNames=${state.block_states} names=${names} selected=${index} onSelect=${select} />`;
    })}
    <${BlockDetails} state=${state} selected=${selected} />
  </section>`;
}

/** Return how many cells of a region are in each state, as a sentence for a screen reader. */
function describeStates(region, stateNames) {
  const counts = new Map();
  for (const state of region.states) counts.set(state, (counts.get(state) ?? 0) + 1);
  return [...counts].map(([state, count]) => `${count * region.blocks_per_cell} ${stateNames[state]}`).join(", ");
}

function describeRegion({ what, block_bytes: size, held_blocks: held, blocks_per_cell: step }) {
  const sampled = step > 1 ? `; each square is the first of ${step} blocks` : "";
  return `${what}: ${formatNumber(held)} blocks of ${formatBytes(size)} held${sampled}`;
}

/** Show a region: a heading, and a canvas with a square for each cell; only cells that have changed are drawn again. */
function Strip({ number, region, stateNames, names, selected, onSelect }) {
  const box = useRef();
  const canvas = useRef();
  const drawn = useRef(null); // {numbering, layout, colors, states, selected} of what the canvas shows
  const [width, setWidth] = useState(0);
  useLayoutEffect(() => {
    const observer = new ResizeObserver(([entry]) => setWidth(Math.floor(entry.contentRect.width)));
    observer.observe(box.current);
    const scheme = matchMedia("(prefers-color-scheme: dark)");
    const forgetDrawn = () => (drawn.current = null); // the next event of the live state draws all, in the new colours
    scheme.addEventListener("change", forgetDrawn);
    return () => {
      observer.disconnect();
      scheme.removeEventListener("change", forgetDrawn);
    };
  }, []);
  const count = region.states.length;
  const layout = makeLayout(width, count);
  useLayoutEffect(() => {
    drawn.current = width && count ? drawStrip(canvas.current, layout, region, stateNames, names, selected, drawn.current) : null;
  });
  const find = (event) => {
    const { left, top } = canvas.current.getBoundingClientRect();
    const column = Math.floor((event.clientX - left) / layout.step);
    const index = Math.floor((event.clientY - top) / layout.step) * layout.columns + column;
    return column >= 0 && column < layout.columns && index >= 0 && index < count ? index : null;
  };
  const timer = useRef();
  const point = (event) => {
    const index = find(event);
    clearTimeout(timer.current);
    if (index !== null) timer.current = setTimeout(() => onSelect(index), HOVER_DELAY);
  };
  const move = (event) => {
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: layout.columns, ArrowUp: -layout.columns };
    const target = { Home: 0, End: count - 1 }[event.key] ?? (event.key in steps ? (selected ?? -steps[event.key]) + steps[event.key] : null);
    if (target === null) return;
    event.preventDefault();
    if (target >= 0 && target < count) onSelect(target);
  };
  return html`<div class="strip" ref=${box}>
    <h4><${InstanceName} name=${region.instance} index=${Math.max(0, names.indexOf(region.instance))} /> · ${describeRegion(region)}</h4>
    ${count > 0 && html`<canvas
      ref=${canvas}
      tabindex="0"
      role="application"
      aria-roledescription="strip of blocks"
      aria-label=${`${region.instance}, ${region.what}: ${count} squares`}
      aria-describedby=${`block-states-${number} block-details`}
      onPointerMove=${point}
      onPointerLeave=${() => clearTimeout(timer.current)}
      onPointerDown=${(event) => onSelect(find(event))}
      onKeyDown=${move}
    ></canvas>`}
    <span id=${`block-states-${number}`} class="hidden">${describeStates(region, stateNames)}</span>
  </div>`;
}

/** Return the places of squares in a canvas of this width: large ones if there are few. */
function makeLayout(width, count) {
  const fitting = Math.sqrt((Math.max(1, width) * 160) / Math.max(1, count));
  const step = Math.max(5, Math.min(18, Math.floor(fitting)));
  const columns = Math.max(1, Math.floor(width / step));
  return { step, columns, rows: Math.ceil(count / columns), width };
}

/** Return the colours of instances and states as the style sheet has them. */
function readColors() {
  const probe = document.createElement("i");
  document.body.append(probe);
  const read = (name) => {
    probe.className = `probe ${name}`;
    return getComputedStyle(probe).color;
  };
  const colors = {
    owners: Array.from({ length: NUM_COLORS }, (_, index) => read(colorClass(index))),
    free: read("free"),
    mark: read("mark"),
    selected: read("selected"),
  };
  probe.remove();
  return colors;
}

function drawStrip(canvas, layout, region, stateNames, names, selected, before) {
  const context = canvas.getContext("2d");
  const { states } = region;
  const numbering = JSON.stringify([stateNames, names]); // which changes with another engine
  const isSame = before?.numbering === numbering && before.layout.width === layout.width && before.states.length === states.length;
  const colors = isSame ? before.colors : readColors();
  if (!isSame) {
    const scale = devicePixelRatio || 1;
    Object.assign(canvas, { width: layout.columns * layout.step * scale, height: layout.rows * layout.step * scale });
    Object.assign(canvas.style, { width: `${layout.columns * layout.step}px`, height: `${layout.rows * layout.step}px` });
    context.scale(scale, scale);
  }
  const color = colors.owners[Math.max(0, names.indexOf(region.instance)) % NUM_COLORS];
  for (let i = 0; i < states.length; i += 1) {
    const wasSelected = isSame && (before.selected === i) !== (selected === i);
    if (isSame && !wasSelected && before.states[i] === states[i]) continue;
    drawCell(context, layout, i, stateNames[states[i]], color, colors, selected === i);
  }
  return { numbering, layout, colors, states: states.slice(), selected };
}

/** Draw one square: states differ by shape as well as by colour. */
function drawCell(context, { step, columns }, index, state, color, colors, isSelected) {
  const x = (index % columns) * step;
  const y = Math.floor(index / columns) * step;
  const size = step - 1;
  context.clearRect(x, y, step, step);
  context.globalAlpha = state === "idle" ? 0.35 : 1;
  context.fillStyle = state === "free" ? colors.free : color;
  if (state === "pending") context.fillRect(x, y + size / 2, size, size / 2);
  else context.fillRect(x, y, size, size);
  context.globalAlpha = 1;
  context.fillStyle = colors.mark;
  if (state === "shared") context.fillRect(x + size / 3, y + size / 3, size / 3, size / 3);
  if (state === "pinned") context.fillRect(x, y + size / 3, size, size / 3);
  if (isSelected) {
    context.strokeStyle = colors.selected;
    context.lineWidth = 2;
    context.strokeRect(x + 1, y + 1, size - 2, size - 2);
  }
}

/** Show the details of the selected block. */
function BlockDetails({ state, selected }) {
  const [details, setDetails] = useState(null);
  const region = state.regions[selected.key];
  const isShown = region !== undefined && selected.index !== null && selected.index < region.states.length;
  const number = isShown ? selected.index * region.blocks_per_cell : null;
  const path = isShown ? `v1/live/blocks/${encodeURIComponent(region.instance)}/${selected.key.split("/").at(-1)}/${number}` : null;
  const content = isShown ? region.states[selected.index] : null;
  useEffect(() => {
    if (path === null) return undefined;
    setDetails(null);
    const abort = new AbortController();
    sendJson(path, { as: "admin", signal: abort.signal }).then(
      (found) => setDetails({ ...found, path }),
      (error) => {
        if (!abort.signal.aborted) setDetails({ path, error: error.message });
      },
    );
    return () => abort.abort();
  }, [path, content]);
  const known = details?.path === path ? details : {};
  return html`<p id="block-details" class="details" aria-live="polite">
    ${isShown ? describeBlock(region, number, state.block_states[content], known) : "No block is selected."}
  </p>`;
}

function describeBlock(region, number, state, details) {
  const parts = [`Block ${formatNumber(number)}`, region.instance, region.what, STATE_TITLES[state]];
  if (details.error) parts.push(details.error);
  if (details.tokens !== undefined) parts.push(describeTokens(details));
  if (details.references !== undefined) parts.push(`${details.references} references`);
  if (details.num_pins) parts.push(`${details.num_pins} pins`);
  if (details.age_seconds !== undefined) parts.push(`computed ${formatSeconds(details.age_seconds)} ago`);
  if (details.idle_seconds !== undefined) parts.push(`idle for ${formatSeconds(details.idle_seconds)}`);
  if (details.prefix) parts.push(`prefix ${details.prefix.slice(0, 8)}`);
  return parts.join(" · ");
}

function describeTokens({ first_token: first, tokens }) {
  if (first === undefined) return `${formatNumber(tokens)} tokens`;
  return `tokens ${formatNumber(first)} to ${formatNumber(first + tokens - 1)} of its text`;
}
