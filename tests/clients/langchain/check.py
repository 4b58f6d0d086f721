"""langchain-openai: texts, batches, streams and chats; a strategy by extra_body; a client's mistake is a BadRequest."""

import sys

import openai
from langchain_openai import ChatOpenAI, OpenAI

URL, MODEL = sys.argv[1:]
PROMPT = "Once upon a time"
common = {"base_url": f"{URL}/v1", "api_key": "none", "model": MODEL, "temperature": 0, "max_retries": 0}

llm = OpenAI(**common, max_tokens=12)
text = llm.invoke(PROMPT)
assert text
assert llm.batch([PROMPT, "The cat"])[0] == text
assert "".join(llm.stream(PROMPT)) == text
told = llm.generate([PROMPT, PROMPT])
assert told.llm_output["token_usage"]["completion_tokens"] == 24
assert OpenAI(**common, max_tokens=12, extra_body={"kv_cache": "contiguous"}).invoke(PROMPT) == text
assert OpenAI(**common, max_tokens=12, n=2, best_of=2).invoke(PROMPT) == text

chat = ChatOpenAI(**common, max_tokens=12)
answer = chat.invoke("Hello! How are you?")
assert answer.content
assert answer.usage_metadata["output_tokens"] <= 12
assert "".join(part.content for part in chat.stream("Hello! How are you?")) == answer.content
assert ChatOpenAI(**common, logprobs=True, top_logprobs=2).invoke("Hello!").response_metadata["logprobs"]["content"]

told = ""
try:
    OpenAI(**common, extra_body={"kv_cache": "magnetic"}).invoke(PROMPT)
except openai.BadRequestError as error:
    told = str(error)
assert "magnetic" in told
