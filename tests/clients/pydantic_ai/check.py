"""pydantic-ai: an agent that calls a tool and reads its answer, whole and streamed, and one with a typed output."""

import asyncio
import sys

from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

URL, MODEL = sys.argv[1:]
QUESTION, ANSWER = "What is the weather in Orl\u00e9ans?", "It is sunny in Orl\u00e9ans."
model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{URL}/v1", api_key="none"))
asked = []


class Weather(BaseModel):
    city: str
    days: int


agent = Agent(model)


@agent.tool_plain
def get_weather(city: str, days: int) -> str:
    """Return the weather of a city."""
    asked.append((city, days))
    return "clear sky"


async def main() -> None:
    assert (await agent.run(QUESTION)).output == ANSWER
    async with agent.run_stream(QUESTION) as stream:
        assert await stream.get_output() == ANSWER
    responses = OpenAIResponsesModel(MODEL, provider=OpenAIProvider(base_url=f"{URL}/v1", api_key="none"))
    assert (await agent.run(QUESTION, model=responses)).output == ANSWER
    assert (await Agent(model, output_type=Weather).run(QUESTION)).output == Weather(city="Orl\u00e9ans", days=3)
    assert asked == [("Orl\u00e9ans", 3)] * 3


asyncio.run(main())
