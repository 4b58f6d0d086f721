/**
 * Completions and chats with every parameter of the API, and the code for the same request.
 *
 * The fields come from the server's own description, openapi.json, so that none is missing.
 */

import { makeAddress, sendForChunks } from "../api.js";
import { CopyButton, html, Notice, usePolled, useRef, useRun, useState } from "../components.js";
import { formatNumber, formatSeconds, showHidden } from "../format.js";

const ENDPOINTS = {
  chat: { title: "Chat", path: "v1/chat/completions" },
  completion: { title: "Completion", path: "v1/completions" },
};
const OWN_FIELDS = ["prompt", "messages", "stream", "stream_options"]; // which the view sets itself
// Those that most people change; the others are folded away
const FIRST_FIELDS = ["max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "seed", "stop", "kv_cache", "kv_cache_reference", "explain"];
const INSTANCE_FIELDS = ["kv_cache", "kv_cache_reference"]; // whose values are the names of strategy instances

// The parameters that the method of OpenAI's Python client has; others go into extra_body
const OPENAI_FIELDS = new Set(
  ("model messages prompt best_of echo frequency_penalty function_call functions logit_bias logprobs max_completion_tokens max_tokens " +
    "metadata modalities n parallel_tool_calls prediction presence_penalty prompt_cache_key reasoning_effort response_format seed " +
    "service_tier stop store stream stream_options suffix temperature tool_choice tools top_logprobs top_p user verbosity").split(" "),
);

export default function PlaygroundView() {
  const schema = usePolled("openapi.json");
  const caches = usePolled("v1/kv_cache");
  const ready = usePolled("ready");
  const error = schema.error ?? caches.error ?? ready.error;
  const instances = caches.data?.data.map((each) => each.name) ?? [];
  return html`<h2>Playground</h2>
    ${error && html`<${Notice} kind="error">${error.message}<//>`}
    ${schema.data
      ? html`<${Playground} schema=${schema.data} model=${ready.data?.model} instances=${instances} />`
      : !error && html`<${Notice}>Loading…<//>`}`;
}

function Playground({ schema, model, instances }) {
  const [kind, setKind] = useState("chat");
  const [prompt, setPrompt] = useState("Once upon a time");
  const [messages, setMessages] = useState([{ role: "user", content: "Hello! Who are you?" }]);
  const [values, setValues] = useState({}); // texts of the fields that were changed, by name
  const { answer, running, start, stop } = useAnswer();
  const fields = readFields(schema, ENDPOINTS[kind].path).map((field) => (INSTANCE_FIELDS.includes(field.name) ? { ...field, values: instances } : field));
  const { body, problem } = makeBody(fields, values, kind === "chat" ? { messages } : { prompt }, model);
  const submit = (event) => {
    event.preventDefault();
    start(ENDPOINTS[kind].path, body);
  };
  const continueChat = () => setMessages([...messages, { role: "assistant", content: answer.texts[0] }, { role: "user", content: "" }]);
  return html`
    <form class="panel" onSubmit=${submit}>
      <fieldset class="choice">
        <legend>Endpoint</legend>
        ${Object.entries(ENDPOINTS).map(
          ([name, { title }]) => html`<label key=${name} class="check"><input type="radio" name="kind" checked=${kind === name} onChange=${() => setKind(name)} />${title}</label>`,
        )}
      </fieldset>
      ${kind === "chat"
        ? html`<${Messages} messages=${messages} onChange=${setMessages} />`
        : html`<label class="wide">Prompt<textarea rows="4" value=${prompt} onInput=${(event) => setPrompt(event.target.value)}></textarea></label>`}
      <${Fields} fields=${fields} values=${values} onChange=${setValues} />
      ${problem && html`<${Notice} kind="error">${problem}<//>`}
      <p class="buttons">
        ${running ? html`<button type="button" onClick=${stop}>Stop</button>` : html`<button class="primary" disabled=${Boolean(problem)}>Send</button>`}
        ${kind === "chat" && answer?.ended && !answer.error && html`<button type="button" onClick=${continueChat}>Continue this chat</button>`}
      </p>
    </form>
    ${answer && html`<${Answer} answer=${answer} />`}
    <${Code} path=${ENDPOINTS[kind].path} body=${{ ...body, stream: true }} />
  `;
}

function Messages({ messages, onChange }) {
  const change = (index, changes) => onChange(messages.map((each, i) => (i === index ? { ...each, ...changes } : each)));
  return html`<fieldset>
    <legend>Messages</legend>
    ${messages.map(
      (message, index) => html`<div key=${index} class="message">
        <select aria-label=${`Role of message ${index + 1}`} value=${message.role} onChange=${(event) => change(index, { role: event.target.value })}>
          ${["system", "user", "assistant"].map((role) => html`<option key=${role}>${role}</option>`)}
        </select>
        <textarea rows="2" aria-label=${`Message ${index + 1}`} value=${message.content} onInput=${(event) => change(index, { content: event.target.value })}></textarea>
        ${messages.length > 1 &&
        html`<button type="button" aria-label=${`Remove message ${index + 1}`} onClick=${() => onChange(messages.filter((_, i) => i !== index))}>×</button>`}
      </div>`,
    )}
    <button type="button" onClick=${() => onChange([...messages, { role: "user", content: "" }])}>Add a message</button>
  </fieldset>`;
}

// ---------------------------------------------------------------- fields
/** Return the fields of an endpoint's body: {name, type, values, description, default, ...}, from openapi.json. */
export function readFields(schema, path) {
  const resolve = (node) => (node.$ref ? node.$ref.slice(2).split("/").reduce((found, key) => found[key], schema) : node);
  const { properties } = resolve(schema.paths[`/${path}`].post.requestBody.content["application/json"].schema);
  return Object.entries(properties)
    .filter(([name]) => !OWN_FIELDS.includes(name))
    .map(([name, property]) => {
      const kinds = (property.anyOf ?? [property]).map(resolve).filter((each) => each.type !== "null");
      const kind = kinds.length === 1 ? kinds[0] : {};
      return { ...kind, ...property, type: kind.type ?? (kinds.some((each) => each.type === "string") ? "text or JSON" : "JSON"), name, values: kind.enum };
    })
    .filter((field) => field.description || (field.default ?? null) !== null || FIRST_FIELDS.includes(field.name)); // others have no effect
}

function Fields({ fields, values, onChange }) {
  const draw = (field) => html`<${Field} key=${field.name} field=${field} text=${values[field.name] ?? ""} onInput=${(text) => onChange({ ...values, [field.name]: text })} />`;
  const isFirst = (field) => FIRST_FIELDS.includes(field.name);
  const changed = fields.filter((field) => !isFirst(field) && values[field.name]).length;
  return html`
    <div class="fields">${fields.filter(isFirst).map(draw)}</div>
    <details>
      <summary>All other parameters${changed > 0 && ` (${changed} set)`}</summary>
      <div class="fields">${fields.filter((field) => !isFirst(field)).map(draw)}</div>
    </details>
  `;
}

function Field({ field, text, onInput }) {
  const { name, type, description, minimum, maximum } = field;
  const choices = type === "boolean" ? ["true", "false"] : field.values;
  const placeholder = formatDefault(field.default);
  const change = (event) => onInput(event.target.value);
  const isNumber = type === "integer" || type === "number";
  return html`<label>
    <code>${name}</code>
    ${choices
      ? html`<select value=${text} onChange=${change}><option value="">${placeholder && `${placeholder} (default)`}</option>${choices.map((each) => html`<option key=${each} value=${String(each)}>${each}</option>`)}</select>`
      : isNumber
        ? html`<input type="number" value=${text} placeholder=${placeholder} min=${readBound(minimum)} max=${readBound(maximum)} step=${type === "integer" ? 1 : "any"} onInput=${change} />`
        : html`<input type="text" value=${text} placeholder=${placeholder || (type === "JSON" ? "JSON" : "")} onInput=${change} />`}
    ${description && html`<small>${description}</small>`}
  </label>`;
}

const formatDefault = (value) => (value == null ? "" : typeof value === "string" ? value : JSON.stringify(value));

/** Return a bound of a number field; none for those that a number cannot hold exactly, such as 2^63. */
const readBound = (value) => (Number.isSafeInteger(value) || !Number.isInteger(value) ? value : undefined);

/** Return {body, problem}: the request of the fields that have a text, and what is wrong with them. */
function makeBody(fields, values, prompt, model) {
  const body = { ...(model && { model }), ...prompt };
  let problem = "";
  for (const { name, type } of fields) {
    const text = values[name];
    if (!text) continue;
    try {
      body[name] = readValue(type, text);
    } catch (error) {
      problem = `${name}: ${error.message}`;
    }
  }
  return { body, problem };
}

/** Return the value that a field's text stands for. Throws an Error with a message for the user. */
function readValue(type, text) {
  if (type === "string") return text;
  if (type === "number") return Number(text);
  if (type === "integer" && !Number.isSafeInteger(Number(text))) throw new Error(`${text} is too large for a page, but not for the API`);
  if (type === "text or JSON" && !/^\s*[[{]/.test(text)) return text;
  try {
    return JSON.parse(text);
  } catch {
    if (type === "text or JSON") return text; // which may begin with a bracket
    throw new Error(`${text} is not JSON`);
  }
}

// ---------------------------------------------------------------- the answer
/** Return the latest answer, and functions to start and stop one. */
function useAnswer() {
  const { running, redraw, start, stop } = useRun();
  const answer = useRef(null);
  const request = (path, body) =>
    start(async (signal) => {
      const began = performance.now();
      const result = { texts: [], details: {} };
      answer.current = result;
      try {
        const streamed = { ...body, stream: true, stream_options: { include_usage: true } };
        for await (const chunk of sendForChunks(path, streamed, signal)) {
          readChunk(result, chunk, began);
          redraw();
        }
      } catch (failure) {
        result.error = signal.aborted ? "Stopped." : failure.message;
      }
      result.ended = true;
    });
  return { answer: answer.current, running, start: request, stop };
}

function readChunk(answer, chunk, began) {
  if (chunk.usage) answer.usage = chunk.usage;
  if (chunk.kv_cache) answer.details.kv_cache = chunk.kv_cache;
  for (const choice of chunk.choices) {
    const text = choice.text ?? choice.delta?.content ?? "";
    if (text) answer.firstSeconds ??= (performance.now() - began) / 1000;
    answer.texts[choice.index] = (answer.texts[choice.index] ?? "") + text;
    // Log-probabilities, explanations, comparisons
    const { index, text: _, delta: __, ...rest } = choice;
    const others = Object.fromEntries(Object.entries(rest).filter(([, value]) => value !== null));
    if (Object.keys(others).length) answer.details[`choice ${index}`] = append(answer.details[`choice ${index}`] ?? {}, others);
  }
  answer.seconds = (performance.now() - began) / 1000;
}

/** Return the fields of two chunks together: lists of the later one, also in objects, continue those of the earlier one. */
function append(earlier, later) {
  const result = { ...earlier };
  for (const [name, value] of Object.entries(later)) {
    const before = earlier[name];
    if (Array.isArray(value)) result[name] = [...(before ?? []), ...value];
    else if (typeof value === "object" && value !== null) result[name] = append(before ?? {}, value);
    else result[name] = value;
  }
  return result;
}

function Answer({ answer }) {
  const { usage } = answer;
  return html`<section aria-label="Answer" aria-busy=${!answer.ended}>
    <h3>Answer</h3>
    ${answer.error && html`<${Notice} kind="error">${answer.error}<//>`}
    ${answer.texts.map(
      (text, index) => html`<div key=${index} class="text" role="group" tabindex="0" aria-label=${`Choice ${index}`}>${showHidden(text)}</div>`,
    )}
    <p class="remark">
      ${[
        answer.firstSeconds !== undefined && `first token after ${formatSeconds(answer.firstSeconds)}`,
        answer.ended && answer.seconds !== undefined && `all after ${formatSeconds(answer.seconds)}`,
        usage && `${formatNumber(usage.prompt_tokens)} prompt tokens, ${formatNumber(usage.prompt_tokens_details?.cached_tokens)} of them cached, ${formatNumber(usage.completion_tokens)} generated`,
      ].filter(Boolean).join(" · ")}
    </p>
    ${answer.ended && html`<details><summary>Other fields of the answer</summary><pre>${showHidden(JSON.stringify(answer.details, null, 2))}</pre></details>`}
  </section>`;
}

// ---------------------------------------------------------------- code
const quoteShell = (text) => `'${text.replaceAll("'", `'"'"'`)}'`;

const WRITERS = {
  curl: (path, body) =>
    [`curl -N ${makeAddress(path)}`, `-H "Authorization: Bearer $API_KEY"`, `-H 'Content-Type: application/json'`, `-d ${quoteShell(JSON.stringify(body))}`].join(" \\\n  "),
  Python: (path, body) => {
    const isChat = path.includes("chat");
    const known = Object.entries(body).filter(([name]) => OPENAI_FIELDS.has(name));
    const extra = Object.entries(body).filter(([name]) => !OPENAI_FIELDS.has(name));
    const lines = known.map(([name, value]) => `    ${name}=${toPython(value)},`);
    if (extra.length) lines.push(`    extra_body=${toPython(Object.fromEntries(extra))},`);
    return `from openai import OpenAI

client = OpenAI(base_url=${toPython(makeAddress("v1"))}, api_key="...")
stream = client.${isChat ? "chat.completions" : "completions"}.create(
${lines.join("\n")}
)
for chunk in stream:
    print(${isChat ? 'chunk.choices[0].delta.content or ""' : "chunk.choices[0].text"}, end="", flush=True)`;
  },
  JavaScript: (path, body) => `const response = await fetch(${JSON.stringify(makeAddress(path))}, {
  method: "POST",
  headers: { "Content-Type": "application/json", Authorization: \`Bearer \${apiKey}\` },
  body: JSON.stringify(${JSON.stringify({ ...body, stream: false }, null, 2).replaceAll("\n", "\n  ")}),
});
console.log((await response.json()).choices[0]);`,
};

/** Return a JSON value as Python writes it. */
export function toPython(value) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map(toPython).join(", ")}]`;
  if (typeof value === "object") return `{${Object.entries(value).map(([key, each]) => `${JSON.stringify(key)}: ${toPython(each)}`).join(", ")}}`;
  return JSON.stringify(value);
}

function Code({ path, body }) {
  const [language, setLanguage] = useState("curl");
  const code = WRITERS[language](path, body);
  return html`<section>
    <h3>Code</h3>
    <p class="buttons">
      ${Object.keys(WRITERS).map(
        (name) => html`<button key=${name} type="button" aria-pressed=${String(language === name)} onClick=${() => setLanguage(name)}>${name}</button>`,
      )}
      <${CopyButton} text=${code} />
    </p>
    <pre class="code" tabindex="0" aria-label=${`Code in ${language}`}>${showHidden(code)}</pre>
  </section>`;
}
