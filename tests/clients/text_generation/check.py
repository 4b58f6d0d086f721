"""TGI's client: chats, whole; it sends "tgi" as the model.

Its `generate` is for TGI's own routes, and it reads no stream of OpenAI's: it wants `role` and `tool_calls` in each
delta.
"""

import sys

from text_generation import Client
from text_generation.types import Message

URL, MODEL = sys.argv[1:]
client = Client(URL, timeout=60)
messages = [Message(role="user", content="Hello! How are you?")]

told = client.chat(messages, max_tokens=12, temperature=0.5, seed=1, n=1)
assert told.choices[0].message.content
assert told.model == MODEL
assert told.system_fingerprint.startswith("fp_")
assert told.usage["completion_tokens"] <= 12
assert client.chat(messages, max_tokens=12, temperature=0.5, seed=1).choices[0].message == told.choices[0].message
