"""Kinds of users of an OpenAI-compatible server, as user classes of locust. Their base class is in `users.py`.

locust -f loadtest/locustfile.py                  # users of all kinds
locust -f loadtest/locustfile.py Chat Cancel      # only users of the kinds Chat and Cancel
"""

from __future__ import annotations

from gevent.pool import Group  # type: ignore[import-untyped]
from locust import events, task
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment

from loadtest.prompts import make_prompt
from loadtest.users import Client, make_option_type

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
MAX_TOKENS_PER_WORD = 2  # maximum number of tokens per word of a prompt, on average
MAX_TEMPLATE_TOKENS = 32  # maximum number of tokens that a chat template adds to a message


def parse_lengths(text: str) -> list[int]:
    """Parse comma-separated lengths such as "8,64,256". Raises ValueError if one is not a whole number."""
    return [int(words) for words in text.split(",")]


@events.init_command_line_parser.add_listener  # type: ignore[untyped-decorator]
def _add_options(parser: LocustArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--prompt-words",
        env_var="LOCUST_PROMPT_WORDS",
        type=make_option_type(parse_lengths),
        default="8,64,256",
        help="lengths of prompts in words, separated by commas; each is equally probable",
    )
    add(
        "--shared-words",
        env_var="LOCUST_SHARED_WORDS",
        type=int,
        default=0,
        help="number of words with which all prompts of Completion users begin",
    )
    add(
        "--system-words",
        env_var="LOCUST_SYSTEM_WORDS",
        type=int,
        default=400,
        help="number of words of the system prompt of all SharedPrompt users",
    )
    add(
        "--document-words",
        env_var="LOCUST_DOCUMENT_WORDS",
        type=int,
        default=1000,
        help="number of words of the prompts of LongDocument users",
    )
    add("--max-tokens", env_var="LOCUST_MAX_TOKENS", type=int, default=64, help="maximum number of tokens of an answer")
    add(
        "--burst",
        env_var="LOCUST_BURST",
        type=int,
        default=8,
        help="number of requests that a Burst user sends at once",
    )
    add(
        "--pause",
        env_var="LOCUST_PAUSE",
        type=float,
        default=1.0,
        help="mean pause of a Chat user between turns, in seconds; a Burst user pauses this long times --burst",
    )
    add(
        "--patience",
        env_var="LOCUST_PATIENCE",
        type=int,
        default=8,
        help="maximum number of pieces of an answer after which a Cancel user closes the connection",
    )


class User(Client):
    """Base class of the users: draws random prompts with the lengths of --prompt-words, and random pauses."""

    abstract = True

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self.prompt_lengths = parse_lengths(self.options.prompt_words)

    def draw_prompt(self, shared: int = 0) -> str:
        return make_prompt(self.random, self.random.choice(self.prompt_lengths), shared)

    def draw_pause(self) -> float:
        mean: float = self.options.pause
        return self.random.expovariate(1 / mean) if mean else 0.0

    def send_completion(self, text: str, max_tokens: int, max_pieces: int | None = None) -> None:
        self.send_request(COMPLETIONS, self.choose_model(), {"prompt": text, "max_tokens": max_tokens}, max_pieces)


class Completion(User):
    """A user that sends a text to be completed, reads the whole answer, and sends the next text without a pause."""

    weight = 3

    @task
    def complete_text(self) -> None:
        self.send_completion(self.draw_prompt(self.options.shared_words), self.options.max_tokens)


class Chat(User):
    """A user that sends the conversation so far with a new message, reads the answer, and pauses.

    Starts a new conversation, perhaps under another strategy, when the next turn may not fit into the model's context.
    """

    weight = 3

    def on_start(self) -> None:
        super().on_start()
        self._start_over()

    def _start_over(self) -> None:
        self.model = self.choose_model()
        self.history: list[dict[str, str]] = []
        self.tokens = 0  # of the conversation

    def wait_time(self) -> float:
        return self.draw_pause()

    @task
    def send_turn(self) -> None:
        max_tokens = self.options.max_tokens
        if (
            self.tokens + max(self.prompt_lengths) * MAX_TOKENS_PER_WORD + MAX_TEMPLATE_TOKENS + max_tokens
            > self.max_model_len
        ):
            self._start_over()
        self.history.append({"role": "user", "content": self.draw_prompt()})
        reply = self.send_request(CHAT, self.model, {"messages": self.history, "max_tokens": max_tokens})
        if reply is None:
            return self._start_over()
        self.history.append({"role": "assistant", "content": reply.text})
        self.tokens = reply.prompt_tokens + reply.completion_tokens


class SharedPrompt(User):
    """A user whose requests begin with a system prompt that all users of this kind share, to use cached prefixes."""

    weight = 2

    @task
    def ask_once(self) -> None:
        system = make_prompt(self.random, 0, self.options.system_words)
        messages = [{"role": "system", "content": system}, {"role": "user", "content": self.draw_prompt()}]
        self.send_request(CHAT, self.choose_model(), {"messages": messages, "max_tokens": self.options.max_tokens})


class LongDocument(User):
    """A user that sends a long text of its own and asks for a short answer."""

    @task
    def send_document(self) -> None:
        max_tokens = min(16, self.options.max_tokens)
        max_words = (self.max_model_len - max_tokens) // MAX_TOKENS_PER_WORD
        self.send_completion(make_prompt(self.random, min(self.options.document_words, max_words)), max_tokens)


class Burst(User):
    """A user that pauses, then sends several requests at the same moment."""

    def __init__(self, environment: Environment) -> None:
        self.concurrency = environment.parsed_options.burst  # type: ignore[union-attr]  # of locust's HTTP client
        super().__init__(environment)

    def wait_time(self) -> float:
        return self.draw_pause() * int(self.options.burst)

    @task
    def ask_at_once(self) -> None:
        asking = Group()
        try:
            for _ in range(self.options.burst):
                asking.spawn(self.send_completion, self.draw_prompt(), self.options.max_tokens)
            asking.join()
        finally:
            asking.kill()  # ends the requests that still run when locust stops this user


class Cancel(User):
    """A user that reads a random number of pieces of the answer, at most --patience, and closes the connection."""

    @task
    def ask_and_leave(self) -> None:
        self.send_completion(self.draw_prompt(), self.options.max_tokens, self.random.randint(1, self.options.patience))
