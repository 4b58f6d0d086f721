"""The official client for Python with tools: calls, whole, streamed and parsed, and the conversation that follows."""

import json
import sys

import openai
from pydantic import BaseModel

URL, MODEL = sys.argv[1:]
client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
QUESTION = {"role": "user", "content": "What is the weather in Orl\u00e9ans?"}


class GetWeather(BaseModel):
    """Return the weather of a city."""

    city: str
    days: int


tool = openai.pydantic_function_tool(GetWeather, name="get_weather")
asked = {"model": MODEL, "messages": [QUESTION], "tools": [tool]}
WEATHER = {"city": "Orl\u00e9ans", "days": 3}

whole = client.chat.completions.create(**asked).choices[0]
(call,) = whole.message.tool_calls
assert (whole.finish_reason, whole.message.content) == ("tool_calls", None)
assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", WEATHER)
assert whole.message.reasoning == "I should look."

(parsed,) = client.chat.completions.parse(**asked).choices[0].message.tool_calls
assert parsed.function.parsed_arguments == GetWeather(**WEATHER)

with client.chat.completions.stream(**asked) as stream:
    events = list(stream)
    streamed = stream.get_final_completion().choices[0]
(done,) = [event for event in events if event.type == "tool_calls.function.arguments.done"]
assert done.parsed_arguments == GetWeather(**WEATHER)
assert streamed.finish_reason == "tool_calls"
assert streamed.message.tool_calls[0].function.arguments == call.function.arguments

for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
    (forced,) = client.chat.completions.create(**asked, tool_choice=choice).choices[0].message.tool_calls
    assert json.loads(forced.function.arguments) == WEATHER

answer = {"role": "tool", "tool_call_id": call.id, "content": "clear sky"}
after = client.chat.completions.create(**asked | {"messages": [QUESTION, whole.message, answer]}).choices[0]
assert (after.finish_reason, after.message.content) == ("stop", "It is sunny in Orl\u00e9ans.")

told = ""
try:
    client.chat.completions.create(**asked | {"messages": [QUESTION, answer]})
except openai.BadRequestError as error:
    told = str(error)
assert "answers the tool call" in told

flat = {"type": "function", **tool["function"]}
response = client.responses.create(model=MODEL, input="What is the weather?", tools=[flat])
reasoning, call = response.output
assert (reasoning.type, call.type, json.loads(call.arguments)) == ("reasoning", "function_call", WEATHER)
items = [{"role": "user", "content": "What is the weather?"}, *response.output]
items.append({"type": "function_call_output", "call_id": call.call_id, "output": "clear sky"})
with client.responses.stream(model=MODEL, input=items, tools=[flat]) as stream:
    text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert stream.get_final_response().output_text == text == "It is sunny in Orl\u00e9ans."
