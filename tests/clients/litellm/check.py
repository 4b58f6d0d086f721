"""litellm: texts and chats, whole and streamed; its error classes follow the status."""

import sys

import litellm

URL, MODEL = sys.argv[1:]
PROMPT = "Once upon a time"
MESSAGES = [{"role": "user", "content": "Hello! How are you?"}]
common = {"api_base": f"{URL}/v1", "api_key": "none", "temperature": 0, "max_tokens": 12, "num_retries": 0}

text = litellm.text_completion(model=f"text-completion-openai/{MODEL}", prompt=PROMPT, **common)
assert text.choices[0].text
assert text.usage.completion_tokens == 12
stream = litellm.text_completion(model=f"text-completion-openai/{MODEL}", prompt=PROMPT, stream=True, **common)
assert "".join(part.choices[0].text or "" for part in stream) == text.choices[0].text

chat = litellm.completion(model=f"openai/{MODEL}", messages=MESSAGES, **common)
assert chat.choices[0].message.content
stream = litellm.completion(model=f"openai/{MODEL}", messages=MESSAGES, stream=True, **common)
assert "".join(part.choices[0].delta.content or "" for part in stream) == chat.choices[0].message.content

for wrong, kind in (({"temperature": 9}, litellm.BadRequestError), ({"model": "openai/nobody"}, litellm.NotFoundError)):
    try:
        litellm.completion(**{"model": f"openai/{MODEL}", "messages": MESSAGES} | common | wrong)
    except kind:
        continue
    raise AssertionError(f"{wrong} was accepted")
