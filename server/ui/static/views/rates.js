/** Rates and times by strategy over the last minutes, computed from differences of the live state's totals. */

import { colorClass, html, InstanceName, Notice, ScrollTable, useState, WithLive } from "../components.js";
import { formatBytes, formatNumber, formatPercent, formatSeconds } from "../format.js";

const WINDOW = 10; // seconds over which a rate is taken
const SHOWN = 300; // seconds that the charts show at most
const SHOWN_FIRST = 60; // seconds that the charts show at least
const STEP = 2; // seconds between two points

const CHARTS = [
  { title: "Tokens a second", format: formatNumber, value: (change) => change.perSecond("generated_tokens") },
  { title: "Cached part of prompts", format: formatPercent, value: (change) => change.share("cached_tokens", "prompt_tokens") },
  { title: "Time to the first token", format: formatSeconds, quantiles: "time_to_first_token" },
  { title: "Time between tokens", format: formatSeconds, quantiles: "inter_token_latency" },
  { title: "Preemptions a second", format: formatNumber, value: (change) => change.perSecond("preemptions") },
  { title: "Evicted a second", format: formatBytes, value: (change) => change.perSecond("evicted_bytes") },
];

/** What an instance has done between two states of the history. */
export class Change {
  constructor(before, after, name) {
    this.seconds = after.time - before.time;
    this.old = before.totals.instances[name];
    this.new = after.totals.instances[name];
    this.bounds = after.totals.bounds;
  }

  count(key) {
    return this.new[key] - (this.old?.[key] ?? 0);
  }

  perSecond(key) {
    return this.seconds > 0 ? this.count(key) / this.seconds : null;
  }

  share(part, whole) {
    const count = this.count(whole);
    return count > 0 ? this.count(part) / count : null;
  }

  /** Return a quantile of times, interpolated within its interval, as Prometheus does; null if there were none. */
  quantile(key, q) {
    const counts = this.new[key].map((count, i) => count - (this.old?.[key][i] ?? 0));
    const total = counts.reduce((sum, count) => sum + count, 0);
    if (!total) return null;
    const bounds = this.bounds[key];
    let below = 0;
    for (let i = 0; i < counts.length; i += 1) {
      if (counts[i] && below + counts[i] >= q * total) {
        if (i >= bounds.length) return bounds.at(-1);
        const lower = i ? bounds[i - 1] : 0;
        return lower + ((bounds[i] - lower) * (q * total - below)) / counts[i];
      }
      below += counts[i];
    }
    return bounds.at(-1);
  }
}

export default function RatesView() {
  return html`<h2>Rates</h2><${WithLive}>${(state, live) => html`<${Rates} names=${Object.keys(state.instances)} history=${live.history} />`}<//>`;
}

/** Return a point at every STEP seconds of the history, each with the state WINDOW seconds before it, if there is one. */
function makePoints(history) {
  const points = [];
  let from = 0;
  let next = -Infinity;
  history.forEach((after, i) => {
    while (from + 1 < i && history[from + 1].time <= after.time - WINDOW) from += 1;
    if (i === 0 || after.time < next) return;
    points.push({ before: history[from], after });
    next = after.time + STEP - 0.1;
  });
  return points.filter((point) => point.after.time >= history.at(-1).time - SHOWN);
}

function Rates({ names, history }) {
  if (history.length < 2) return html`<${Notice}>The first rates appear in a second.<//>`;
  const points = makePoints(history);
  const latest = points.at(-1);
  return html`
    <p class="remark">Over the last five minutes, as far as this page was open. Each point stands for the ${WINDOW} seconds before it.</p>
    <${Now} names=${names} latest=${latest} />
    <div class="charts">
      ${CHARTS.map((chart) => html`<${Chart} key=${chart.title} chart=${chart} names=${names} points=${points} />`)}
    </div>
  `;
}

/** Show the figures of the last seconds as a table. */
function Now({ names, latest }) {
  const title = `The last ${WINDOW} seconds`;
  const columns = CHARTS.map((chart) => [chart.title + (chart.quantiles ? ", median / 95th percentile" : ""), true]);
  return html`<${ScrollTable} label=${title} caption=${title} columns=${[["strategy"], ...columns]}>
    ${names.map((name, index) => {
      const change = new Change(latest.before, latest.after, name);
      return html`<tr key=${name}>
        <th scope="row"><${InstanceName} name=${name} index=${index} /></th>
        ${CHARTS.map((chart) => {
          const values = chart.quantiles ? [0.5, 0.95].map((q) => change.quantile(chart.quantiles, q)) : [chart.value(change)];
          return html`<td key=${chart.title} class="number">${values.map((value) => chart.format(value)).join(" / ")}</td>`;
        })}
      </tr>`;
    })}
  <//>`;
}

// ---------------------------------------------------------------- charts
/** Return the lines of a chart: {name, colorIndex, dashed, values}; quantiles have two lines for each instance. */
function makeLines(chart, names, points) {
  const makeLine = (name, colorIndex, value, dashed = false) => ({
    name,
    colorIndex,
    dashed,
    values: points.map((point) => value(new Change(point.before, point.after, name))),
  });
  return names.flatMap((name, index) =>
    chart.quantiles
      ? [
          makeLine(name, index, (change) => change.quantile(chart.quantiles, 0.5)),
          makeLine(name, index, (change) => change.quantile(chart.quantiles, 0.95), true),
        ]
      : [makeLine(name, index, chart.value)],
  );
}

/** Return the least number of the form 1, 2 or 5 times a power of ten that is not below a value; a power of 2 for bytes. */
export function roundUp(value, isBytes = false) {
  if (!(value > 0)) return 1;
  if (isBytes) return 2 ** Math.ceil(Math.log2(value));
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= value * 0.999999);
}

/**
 * Draw lines over time as SVG, in a box of 100 by 100 that is stretched to its place; the arrow keys go back in time.
 *
 * A chart library would be larger than the whole page, and would need sizes and colours that are in the style sheet.
 */
function Chart({ chart, names, points }) {
  const [pointed, setPointed] = useState(null);
  const lines = makeLines(chart, names, points).filter((line) => line.values.some((value) => value));
  const end = points.at(-1).after.time;
  const top = roundUp(Math.max(...lines.flatMap((line) => line.values.filter((value) => value !== null)), 0), chart.format === formatBytes);
  const seconds = Math.max(SHOWN_FIRST, end - points[0].after.time);
  const x = (i) => 100 - ((end - points[i].after.time) / seconds) * 100;
  const y = (value) => 100 - (value / top) * 100;
  const index = pointed === null ? points.length - 1 : Math.min(pointed, points.length - 1);
  const point = (event) => {
    const { left, width } = event.currentTarget.getBoundingClientRect();
    const time = end - seconds * (1 - (event.clientX - left) / width);
    const later = points.findIndex((each) => each.after.time >= time);
    setPointed(later < 0 ? points.length - 1 : later);
  };
  const move = (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") setPointed(null);
    if (!step) return;
    event.preventDefault();
    setPointed(Math.min(points.length - 1, Math.max(0, index + step)));
  };
  return html`<figure class="chart">
    <figcaption>${chart.title}${chart.quantiles && html`<small> median, and 95th percentile (dashed)</small>`}</figcaption>
    <div class="plot">
      <div class="scale"><span>${chart.format(top)}</span><span>${chart.format(top / 2)}</span><span>${chart.format(0)}</span></div>
      <svg viewBox="0 0 100 100" preserveAspectRatio="none" tabindex="0" role="application" aria-roledescription="chart" aria-label=${`${chart.title} over time`} onPointerMove=${point} onPointerLeave=${() => setPointed(null)} onKeyDown=${move} onBlur=${() => setPointed(null)}>
        <path class="rule" d="M0 0H100M0 50H100M0 100H100" />
        ${lines.map((line, i) => html`<path key=${i} class=${`line ${colorClass(line.colorIndex)} ${line.dashed ? "dashed" : ""}`} d=${makePath(line.values, x, y)} />`)}
        ${pointed !== null && html`<path class="cursor" d=${`M${x(index)} 0V100`} />`}
      </svg>
    </div>
    <div class="times"><span>${formatSeconds(seconds)} ago</span><span>${pointed === null ? "now" : `${formatSeconds(end - points[index].after.time)} ago`}</span></div>
    <ul class="legend" aria-live=${pointed === null ? "off" : "polite"}>
      ${lines.length === 0 && html`<li>none in these minutes</li>`}
      ${names.map((name, i) => {
        const values = lines.filter((line) => line.name === name).map((line) => chart.format(line.values[index]));
        return values.length > 0 && html`<li key=${name}><${InstanceName} name=${name} index=${i} />: ${values.join(" / ")}</li>`;
      })}
    </ul>
  </figure>`;
}

/** Return the path of a line; where there is no value it is interrupted, and a single value is a short line. */
function makePath(values, x, y) {
  let path = "";
  values.forEach((value, i) => {
    if (value === null) return;
    const isStart = i === 0 || values[i - 1] === null;
    path += `${isStart ? "M" : "L"}${x(i).toFixed(2)} ${y(value).toFixed(2)}`;
    if (isStart && (values[i + 1] ?? null) === null) path += "h.5";
  });
  return path;
}
