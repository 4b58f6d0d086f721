"""The official client for Python: models, texts and chats, whole, streamed and cancelled; errors by their class."""

import sys

import openai

URL, MODEL = sys.argv[1:]
PROMPT = "Once upon a time"
MESSAGES = [{"role": "user", "content": "Hello! How are you?"}]
client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)

assert MODEL in [each.id for each in client.models.list()]
assert client.models.retrieve(f"{MODEL}:paged").id == f"{MODEL}:paged"

wanted = {"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
whole = client.completions.create(**wanted, logprobs=2)
assert whole.usage.completion_tokens == 12
assert len(whole.choices[0].logprobs.tokens) == 12
assert whole._request_id
chunks = list(client.completions.create(**wanted, stream=True, stream_options={"include_usage": True}))
assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
assert chunks[-1].usage.completion_tokens == 12
assert (
    client.completions.create(**wanted, extra_body={"kv_cache": "contiguous"}).choices[0].text == whole.choices[0].text
)

said = {"model": MODEL, "messages": MESSAGES, "max_completion_tokens": 12, "temperature": 0}
chat = client.chat.completions.create(**said, logprobs=True, top_logprobs=2)
assert len(chat.choices[0].logprobs.content[0].top_logprobs) == 2
with client.chat.completions.stream(**said) as stream:
    written = "".join(event.delta for event in stream if event.type == "content.delta")
assert written == chat.choices[0].message.content

with client.completions.create(**wanted | {"max_tokens": 1500}, stream=True) as endless:
    next(iter(endless))

for wrong, kind in (({"temperature": 9}, openai.BadRequestError), ({"model": "nobody"}, openai.NotFoundError)):
    try:
        client.completions.create(**wanted | wrong)
    except kind:
        continue
    raise AssertionError(f"{wrong} was accepted")
