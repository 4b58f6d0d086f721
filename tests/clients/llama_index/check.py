"""llama-index's OpenAILike: complete and chat, whole and streamed."""

import sys

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

URL, MODEL = sys.argv[1:]
PROMPT = "Once upon a time"
common = {"model": MODEL, "api_base": f"{URL}/v1", "api_key": "none", "temperature": 0, "max_tokens": 12}

llm = OpenAILike(**common, is_chat_model=False)
text = llm.complete(PROMPT).text
assert text
assert list(llm.stream_complete(PROMPT))[-1].text == text

chat = OpenAILike(**common, is_chat_model=True)
messages = [ChatMessage(role="user", content="Hello! How are you?")]
said = chat.chat(messages).message.content
assert said
assert list(chat.stream_chat(messages))[-1].message.content == said
