// The official client for JavaScript with tools: calls, whole and streamed, and its helper that runs the tools.
import assert from "node:assert/strict";
import OpenAI from "openai";

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "What is the weather in Orl\u00e9ans?" }];
const parameters = { type: "object", properties: { city: { type: "string" }, days: { type: "integer" } } };
const tools = [{ type: "function", function: { name: "get_weather", description: "The weather.", parameters } }];
const weather = { city: "Orl\u00e9ans", days: 3 };

const [choice] = (await client.chat.completions.create({ model, messages, tools })).choices;
assert.equal(choice.finish_reason, "tool_calls");
const [call] = choice.message.tool_calls;
assert.equal(call.function.name, "get_weather");
assert.deepEqual(JSON.parse(call.function.arguments), weather);

const runner = client.chat.completions.stream({ model, messages, tools });
const [streamed] = (await runner.finalMessage()).tool_calls;
assert.equal(streamed.function.arguments, call.function.arguments);

for (const stream of [false, true]) {
  const seen = [];
  const get_weather = (given) => (seen.push(given), "clear sky");
  const run = client.chat.completions.runTools({
    model, messages, stream,
    tools: [{ type: "function", function: { ...tools[0].function, function: get_weather, parse: JSON.parse } }],
  });
  assert.equal(await run.finalContent(), "It is sunny in Orl\u00e9ans.");
  assert.deepEqual(seen, [weather]);
}

const flat = tools.map((each) => ({ type: "function", strict: false, ...each.function }));
const input = [{ role: "user", content: "What is the weather?" }];
const first = await client.responses.create({ model, input, tools: flat });
const made = first.output.find((item) => item.type === "function_call");
assert.deepEqual(JSON.parse(made.arguments), weather);
input.push(...first.output, { type: "function_call_output", call_id: made.call_id, output: "clear sky" });
const said = await client.responses.stream({ model, input, tools: flat }).finalResponse();
assert.equal(said.output_text, "It is sunny in Orl\u00e9ans.");

await assert.rejects(
  client.chat.completions.create({ model, messages, tools: [{ type: "function", function: { name: "a b" } }] }),
  OpenAI.BadRequestError,
);
