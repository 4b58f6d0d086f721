"""instructor: models of pydantic by a tool that must be called, whole and streamed."""

import sys

import instructor
import openai
from pydantic import BaseModel

URL, MODEL = sys.argv[1:]
MESSAGES = [{"role": "user", "content": "What is the weather in Orl\u00e9ans?"}]


class Weather(BaseModel):
    city: str
    days: int


raw = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
client = instructor.from_openai(raw, mode=instructor.Mode.TOOLS)
weather = client.chat.completions.create(model=MODEL, messages=MESSAGES, response_model=Weather, max_retries=0)
assert (weather.city, weather.days) == ("Orl\u00e9ans", 3)
*_, last = client.chat.completions.create_partial(model=MODEL, messages=MESSAGES, response_model=Weather)
assert (last.city, last.days) == ("Orl\u00e9ans", 3)
