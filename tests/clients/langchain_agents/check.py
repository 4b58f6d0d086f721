"""langchain's agents: a tool is called and its answer read, whole and streamed; a structured output by a tool."""

import sys

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

URL, MODEL = sys.argv[1:]
QUESTION = {"messages": [{"role": "user", "content": "What is the weather in Orl\u00e9ans?"}]}
asked = []


@tool
def get_weather(city: str, days: int) -> str:
    """Return the weather of a city."""
    asked.append((city, days))
    return "clear sky"


class Weather(BaseModel):
    """The weather of a city."""

    city: str
    days: int


chat = ChatOpenAI(base_url=f"{URL}/v1", api_key="none", model=MODEL, max_retries=0)
agent = create_agent(chat, tools=[get_weather])
told = agent.invoke(QUESTION)["messages"]
assert [message.type for message in told] == ["human", "ai", "tool", "ai"]
assert told[-1].content == "It is sunny in Orl\u00e9ans."
assert asked == [("Orl\u00e9ans", 3)]

parts = [part for part, _ in agent.stream(QUESTION, stream_mode="messages")]
assert "".join(part.content for part in parts if part.type == "AIMessageChunk") == "It is sunny in Orl\u00e9ans."
assert asked == [("Orl\u00e9ans", 3)] * 2

bound = chat.bind_tools([get_weather], tool_choice="get_weather")
assert bound.invoke("weather?").tool_calls[0]["args"] == {"city": "Orl\u00e9ans", "days": 3}
structured = chat.with_structured_output(Weather, method="function_calling")
assert structured.invoke("weather?") == Weather(city="Orl\u00e9ans", days=3)
