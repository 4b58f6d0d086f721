"""Calls of tools after 4,000 tokens of conversation, with keys and values in every format.

A call is required: after so long a text this model often ends its message at once otherwise, with exact keys and
values, too (30 of 50). Which tool it calls, and with what arguments, is its own choice.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest

from tests.end_to_end.server_process import Server
from tests.real.model_files import read_texts
from tests.real.serving import FORMATS, serving_instances

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]
MODEL = "qwen-0.5b"
INSTANCES = {"exact": {"preset": "exact"}, **FORMATS}
CALLS = 50
LOST = 4  # calls of the 50 that a format may get wrong beyond those of exact keys and values
PARALLEL = 8
EXCERPTS, EXCERPT = 6, 2_000  # excerpts of real text in the conversation, and characters of each
LEAST_TOKENS, MOST_TOKENS = 3_500, 4_500  # of the conversation

CITIES = ("Oslo", "Denver", "Nairobi", "Quito", "Hanoi", "Tallinn", "Montevideo", "Sapporo", "Adelaide", "Zagreb")
CURRENCIES = ("EUR", "USD", "JPY", "CHF", "GBP", "SEK", "INR", "BRL")
TITLES = ("Budget review", "Dentist", "Team lunch", "Piano lesson", "Site visit", "Book club")
NAMES = ("anna.keller", "jonas.berg", "mei.tanaka", "luis.ortega", "priya.nair", "tom.fischer")
SUBJECTS = ("Travel costs", "New contract", "Holiday plans", "Broken printer", "Meeting notes", "Welcome")
WORDS = ("invoice", "roadmap", "passport", "recipe", "thesis", "mortgage", "syllabus", "warranty")
EXTENSIONS = ("pdf", "docx", "txt", "csv", "md", "xlsx")
STRING, NUMBER = {"type": "string"}, {"type": "number"}


class Task(NamedTuple):
    """A user's message, and the call that it asks for."""

    message: str
    name: str
    arguments: Mapping[str, Any]


def make_tool(name: str, description: str, **parameters: Any) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": parameters,
        "required": [*parameters],
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS = [
    make_tool("get_weather", "Return the weather of a city.", city=STRING, unit={"enum": ["celsius", "fahrenheit"]}),
    make_tool(
        "convert_currency", "Convert an amount of money.", amount=NUMBER, from_currency=STRING, to_currency=STRING
    ),
    make_tool("create_event", "Add an event to the calendar.", title=STRING, date=STRING, start=STRING),
    make_tool("send_email", "Send an email.", to=STRING, subject=STRING),
    make_tool("search_files", "Find files that contain a text.", query=STRING, extension=STRING),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("tool_calls")
    with serving_instances(MODEL, folder, instances=INSTANCES, max_seq_len=8192) as server:
        yield server


def test_fewer_bits_lose_few_calls(server: Server, rng: random.Random) -> None:
    earlier = make_conversation(rng)
    tasks = draw_tasks(rng)
    right = {name: count_right(server, name, earlier, tasks) for name in INSTANCES}
    print(f"right calls of {CALLS}:", right)
    assert right["exact"] >= 0.8 * CALLS, right
    for name in FORMATS.keys() - {"int4"}:
        assert right[name] >= right["exact"] - LOST, right


def count_right(server: Server, instance: str, earlier: list[Any], tasks: list[Task]) -> int:
    """Return the number of tasks whose call has the right name and exactly the right arguments."""
    first, *others = tasks  # the first computes the conversation, which the others share
    with ThreadPoolExecutor(PARALLEL) as pool:
        answers = [ask(server, instance, earlier, first)]
        answers += pool.map(lambda task: ask(server, instance, earlier, task), others)
    assert all(LEAST_TOKENS < answer["usage"]["prompt_tokens"] < MOST_TOKENS for answer in answers)
    assert all(answer["kv_cache"]["cached_tokens"] > LEAST_TOKENS for answer in answers[1:])
    return sum(is_right(answer, task) for answer, task in zip(answers, tasks, strict=True))


def ask(server: Server, instance: str, earlier: list[Any], task: Task) -> Any:
    """Return the answer to a conversation that ends with the task's message."""
    messages = [*earlier, {"role": "user", "content": task.message}]
    body = {"model": server.model, "messages": messages, "tools": TOOLS, "tool_choice": "required"}
    answer = server.post("/v1/chat/completions", **body, temperature=0, max_tokens=100, kv_cache=instance)
    assert answer.status_code == 200, answer.text
    return answer.json()


def is_right(answer: Any, task: Task) -> bool:
    calls = answer["choices"][0]["message"].get("tool_calls") or []
    if [call["function"]["name"] for call in calls] != [task.name]:
        return False
    try:
        return bool(json.loads(calls[0]["function"]["arguments"]) == task.arguments)
    except ValueError:
        return False


# ---------------------------------------------------------------- what is said
def make_conversation(rng: random.Random) -> list[Any]:
    """Return messages in which real texts and calls of every tool alternate."""
    texts = list(read_texts().values())
    messages: list[Any] = []
    for i in range(EXCERPTS):
        begin = i // len(texts) * EXCERPT
        excerpt = texts[i % len(texts)][begin : begin + EXCERPT]
        messages += [
            {"role": "user", "content": f"Keep this in mind, I will come back to it later:\n\n{excerpt}"},
            {"role": "assistant", "content": "I have read it."},
        ]
        if i < len(TOOLS):
            messages += make_call(DRAW[TOOLS[i]["function"]["name"]](rng), i)
    return messages


def make_call(task: Task, number: int) -> list[Any]:
    """Return the messages of a task that has been done."""
    function = {"name": task.name, "arguments": json.dumps(task.arguments)}
    call = {"id": f"call_{number}", "type": "function", "function": function}
    return [
        {"role": "user", "content": task.message},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": '{"status": "ok"}'},
        {"role": "assistant", "content": "Done."},
    ]


def draw_tasks(rng: random.Random) -> list[Task]:
    """Return different tasks, equally many for each tool, in any order."""
    tasks: dict[str, Task] = {}
    for draw in DRAW.values():
        wanted = len(tasks) + CALLS // len(DRAW)
        while len(tasks) < wanted:
            task = draw(rng)
            tasks[task.message] = task
    return rng.sample([*tasks.values()], CALLS)


def draw_weather(rng: random.Random) -> Task:
    city, unit = rng.choice(CITIES), rng.choice(("celsius", "fahrenheit"))
    return Task(f"What is the weather in {city}, in {unit}?", "get_weather", {"city": city, "unit": unit})


def draw_conversion(rng: random.Random) -> Task:
    amount, (source, target) = rng.randrange(20, 2_000), rng.sample(CURRENCIES, 2)
    arguments = {"amount": amount, "from_currency": source, "to_currency": target}
    return Task(f"Convert {amount} {source} to {target}.", "convert_currency", arguments)


def draw_event(rng: random.Random) -> Task:
    title, date = rng.choice(TITLES), f"2027-{rng.randrange(1, 13):02}-{rng.randrange(1, 29):02}"
    start = f"{rng.randrange(8, 20):02}:{rng.choice((0, 15, 30, 45)):02}"
    arguments = {"title": title, "date": date, "start": start}
    return Task(f'Create the event "{title}" on {date} at {start}.', "create_event", arguments)


def draw_email(rng: random.Random) -> Task:
    to, subject = f"{rng.choice(NAMES)}@example.com", rng.choice(SUBJECTS)
    return Task(f'Send an email to {to} with the subject "{subject}".', "send_email", {"to": to, "subject": subject})


def draw_search(rng: random.Random) -> Task:
    query, extension = rng.choice(WORDS), rng.choice(EXTENSIONS)
    message = f'Search for "{query}" in files with the extension {extension}.'
    return Task(message, "search_files", {"query": query, "extension": extension})


DRAW = {
    "get_weather": draw_weather,
    "convert_currency": draw_conversion,
    "create_event": draw_event,
    "send_email": draw_email,
    "search_files": draw_search,
}
