// The official client for JavaScript: models, texts and chats, whole, streamed and cancelled; errors by their class.
import assert from "node:assert/strict";
import OpenAI from "openai";

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const prompt = "Once upon a time";
const messages = [{ role: "user", content: "Hello! How are you?" }];

assert((await client.models.list()).data.some((each) => each.id === model));
assert.equal((await client.models.retrieve(`${model}:paged`)).id, `${model}:paged`);

const wanted = { model, prompt, max_tokens: 12, temperature: 0 };
const whole = await client.completions.create(wanted);
assert.equal(whole.usage.completion_tokens, 12);
assert(whole._request_id);
let text = "";
for await (const chunk of await client.completions.create({ ...wanted, stream: true })) text += chunk.choices[0].text;
assert.equal(text, whole.choices[0].text);

const chat = await client.chat.completions.create({ model, messages, max_completion_tokens: 12, temperature: 0, logprobs: true });
assert(chat.choices[0].logprobs.content.length > 0);
const runner = client.chat.completions.stream({ model, messages, max_completion_tokens: 12, temperature: 0 });
assert.equal(await runner.finalContent(), chat.choices[0].message.content);

const endless = await client.completions.create({ ...wanted, max_tokens: 1500, stream: true });
for await (const _ of endless) break;
endless.controller.abort();

await assert.rejects(client.completions.create({ ...wanted, temperature: 9 }), OpenAI.BadRequestError);
await assert.rejects(client.completions.create({ ...wanted, model: "nobody" }), OpenAI.NotFoundError);
