"""huggingface_hub's InferenceClient: chats, whole and streamed, by both of its names; it sends "dummy" as the model."""

import sys

from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError

URL, MODEL = sys.argv[1:]
MESSAGES = [{"role": "user", "content": "Hello! How are you?"}]
wanted = {"max_tokens": 12, "temperature": 0, "seed": 1, "stop": ["\n\n", "User:"]}
client = InferenceClient(base_url=f"{URL}/v1", api_key="none")

told = client.chat_completion(MESSAGES, **wanted, logprobs=True, top_logprobs=2)
text = told.choices[0].message.content
assert text
assert told.model == MODEL
assert told.system_fingerprint.startswith("fp_")
assert told.usage.completion_tokens <= 12
assert len(told.choices[0].logprobs.content[0].top_logprobs) == 2

parts = list(client.chat.completions.create(MESSAGES, **wanted, stream=True, stream_options={"include_usage": True}))
assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == text
assert parts[-1].usage.completion_tokens == told.usage.completion_tokens
named = InferenceClient(model=f"{URL}/v1", api_key="none")
assert named.chat_completion(MESSAGES, **wanted).choices[0].message.content == text

status = 200
try:
    client.chat_completion(MESSAGES, temperature=9)
except HfHubHTTPError as error:
    status = error.response.status_code
assert status == 400
