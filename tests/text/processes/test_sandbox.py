"""Models' tokenizers and chat templates in a process of their own: as good as in this one, and harmless."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import tokenizers
from tokenizers import Regex, decoders, models, normalizers

from config.errors import SettingsError
from server.grammar.constraint import Constraint
from server.text.errors import GrammarError, TextLimitError, TextRefused, TextUnavailable, TokenizerError
from server.text.processes import sandbox
from server.text.processes.messages import ChatDefaults, Encode, EncodeChat, Start
from server.text.processes.sandbox import CallLimits, CallQueue, SandboxedTokenizer
from server.text.processes.text_process import MODULE, ProcessFailed, TextProcess, make_environment
from server.text.tokenizer import Tokenizer, TokenizerBase
from tests.text.hostile_models import (
    COMPILED,
    TEMPLATES,
    growing_tokenizer,
    panicking_tokenizer,
    save_tokenizer,
    save_with_template,
    slow_tokenizer,
)
from tests.text.tiny_tokenizers import KINDS, byte_level

MIB = 2**20
TIGHT = CallLimits(0.5, 64 * MIB)  # bombs exceed them soon
WIDE = CallLimits(60.0, 1024 * MIB)
ROOT = Path(__file__).parents[3]
HELLO = [0, 261]

Asking = Callable[[TokenizerBase], Coroutine[Any, Any, Any]]
Use = Callable[[SandboxedTokenizer], Coroutine[Any, Any, None]]


def run(directory: Path, limits: CallLimits, use: Use, **how: Any) -> None:
    async def used() -> None:
        async with SandboxedTokenizer(directory, limits, **how) as tokenizer:
            await use(tokenizer)

    asyncio.run(used())


def chat(content: str = "hello", **variables: Any) -> EncodeChat:
    return EncodeChat([{"role": "user", "content": content}], 10_000, variables=variables)


def children(role: str = "texts") -> list[psutil.Process]:
    """Return those of this process that read texts, or check grammars, zombies of both included."""
    return [child for child in psutil.Process().children() if has_role(child, role)]


def has_role(child: psutil.Process, role: str) -> bool:
    """Return whether it has a role, or may have had it: zombies have no command line."""
    return child.status() == psutil.STATUS_ZOMBIE or child.cmdline()[-2:] == [MODULE, role]


def the_child(role: str = "texts") -> psutil.Process:
    (child,) = children(role)
    return child


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


# ---------------------------------------------------------------- ordinary texts
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_as_in_this_process(tmp_path: Path, kind: str) -> None:
    template = (Path(__file__).parents[1] / "templates" / "mistral.jinja").read_text()
    directory = save_tokenizer(tmp_path, KINDS[kind](), template)
    (directory / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    here = Tokenizer.from_directory(directory)
    print(f"seed {(seed := random.randrange(2**32))}")
    rng = random.Random(seed)
    letters = "ahelo wz\u00e9\u2603\U0001f600\n\u2581<s>"
    texts = ["", "hello world", *("".join(rng.choices(letters, k=rng.choice((3, 40, 5000)))) for _ in range(12))]

    async def all_of(tokenizer: TokenizerBase) -> list[Any]:
        found: list[Any] = [tokenizer.vocab_size]
        for text in texts:
            for special in (True, False):
                ids = await tokenizer.encode(text, add_special_tokens=special)
                found += [ids, [tokenizer.piece(i) for i in ids], [tokenizer.token_string(i) for i in ids[:50]]]
                found += [tokenizer.decode(ids, skip_special_tokens=special), await tokenizer.decode_many(ids)]
                found += [here.backend.decode(ids, skip_special_tokens=special) == found[-2]]
            found += [await tokenizer.encode_chat(chat(text)), await refusal(tokenizer.encode_infill(text, "x"))]
        return found

    async def compare(tokenizer: SandboxedTokenizer) -> None:
        theirs = await all_of(tokenizer)
        assert theirs == await all_of(here)
        assert False not in [found for found in theirs if isinstance(found, bool)]

    run(directory, WIDE, compare)


def test_defaults_of_chats_count_for_short_and_long_ones(tmp_path: Path) -> None:
    directory = save_tokenizer(tmp_path, byte_level(), "{{ messages[0].content }}{{ end }}</s>")

    async def use(tokenizer: SandboxedTokenizer) -> None:
        for content in ("</s>", "</s>" * 3000):
            found = await tokenizer.encode_chat(EncodeChat([{"role": "user", "content": content}], 100_000))
            assert found.text == f"{content}!</s>"
            assert found.ids.count(1) == 1

    run(directory, WIDE, use, chat=ChatDefaults(split_special_tokens=True, default_chat_template_kwargs={"end": "!"}))


async def refusal(call: Coroutine[Any, Any, Any]) -> tuple[str, str, str | None]:
    with pytest.raises(TextRefused) as refused:
        await call
    return type(refused.value).__name__, str(refused.value), refused.value.code


def test_whatever_json_can_say_reaches_the_template(tmp_path: Path) -> None:
    given = {"wide": 10**40, "nested": [{"a": [None, True, 1.5, "\u2603"]}], "none": None, "less": -(10**30)}
    directory = save_tokenizer(tmp_path, byte_level(), "{{ wide }} {{ nested }} {{ none }} {{ less }}")

    async def use(tokenizer: SandboxedTokenizer) -> None:
        here = Tokenizer.from_directory(directory)
        assert await tokenizer.encode_chat(chat(**given)) == await here.encode_chat(chat(**given))
        deep: list[Any] = []
        for _ in range(100_000):
            deep = [deep]
        with pytest.raises(TextRefused, match="nested too deeply"):
            await tokenizer.encode_chat(chat(wide=deep))
        while deep:  # freeing it in one piece would be another recursion
            deep = deep[0]
        assert await tokenizer.encode("hello") == HELLO

    run(directory, WIDE, use)


def test_a_long_text_goes_to_a_process_that_goes_again(tmp_path: Path) -> None:
    text = "hello world " * 20_000

    async def use(tokenizer: SandboxedTokenizer) -> None:
        assert len(children()) == 1
        assert await tokenizer.encode(text) == await Tokenizer(byte_level()).encode(text)
        await until(lambda: sum(child.status() != psutil.STATUS_ZOMBIE for child in children()) == 1)
        assert await tokenizer.encode(text) == await Tokenizer(byte_level()).encode(text)

    run(save_tokenizer(tmp_path, byte_level()), WIDE, use, linger=0.01)


def test_the_process_imports_no_more_than_it_needs() -> None:
    program = f"import sys, {sandbox.__name__}_process; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    heavy = {"torch", "transformers", "numpy", "fastapi", "starlette", "uvicorn", "pydantic", "kernels", "psutil"}
    assert heavy.isdisjoint(name.split(".")[0] for name in done.stdout.split())


def test_the_process_has_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVMUX_API_KEYS", "secret-key")
    assert not [value for value in make_environment(os.environ).values() if "secret-key" in value]


# ---------------------------------------------------------------- bombs
def refused_while_others_are_answered(directory: Path, call: Asking) -> str:
    """Return the code of the refusal; check that this process's memory does not grow and that all children end."""
    codes: list[str] = []
    hello = asyncio.run(Tokenizer.from_directory(directory).encode("hello"))

    async def use(tokenizer: SandboxedTokenizer) -> None:
        bomb = asyncio.create_task(refusal(call(tokenizer)))
        before, answered = psutil.Process().memory_info().rss, 0
        while not bomb.done() or not answered:
            assert await tokenizer.encode("hello") == hello
            answered += 1
        codes.append(bomb.result()[2] or "")
        assert psutil.Process().memory_info().rss - before < 32 * MIB

    run(directory, TIGHT, use)
    assert not children()
    return codes[0]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_that_takes_all(tmp_path: Path, name: str) -> None:
    """Here because a client says so: others use the same template."""
    directory = save_with_template(tmp_path, TEMPLATES[name])
    code = refused_while_others_are_answered(directory, lambda tokenizer: tokenizer.encode_chat(chat(n=1)))
    assert code in ("text_timeout", "text_memory")


def test_a_template_that_cannot_be_compiled_in_time(tmp_path: Path) -> None:
    directory = save_tokenizer(tmp_path, byte_level(), COMPILED)
    assert refused_while_others_are_answered(directory, lambda it: it.encode_chat(chat())) == "text_timeout"


@pytest.mark.parametrize(
    ("make", "text", "codes"),
    [
        (panicking_tokenizer, "a" * 40 + "b", {"tokenizer_failed"}),
        (growing_tokenizer, "q" * 10, {"text_memory"}),
        (slow_tokenizer, "ae" * 30_000, {"text_timeout"}),
        (slow_tokenizer, "ae" * 50_000, {"text_timeout"}),
    ],
)
def test_a_tokenizer_that_takes_all(tmp_path: Path, make: Callable[[], Any], text: str, codes: set[str]) -> None:
    directory = save_tokenizer(tmp_path, make())
    assert refused_while_others_are_answered(directory, lambda tokenizer: tokenizer.encode(text)) in codes


def test_the_message_says_what_was_exceeded(tmp_path: Path) -> None:
    async def use(tokenizer: SandboxedTokenizer) -> None:
        for n, message in (
            ("a power", "took more than 0.5 s of CPU time for these messages"),
            ("a filter", "more than 64 MiB of"),
        ):
            with pytest.raises(TextLimitError, match=message):
                await tokenizer.encode_chat(chat(n=1, which=n))

    either = "{% if which == 'a power' %}" + TEMPLATES["a power"] + "{% else %}" + TEMPLATES["a filter"] + "{% endif %}"
    run(save_with_template(tmp_path, either), TIGHT, use)


def test_a_panic_costs_one_text(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async def use(tokenizer: SandboxedTokenizer) -> None:
        child = the_child().pid
        with pytest.raises(TokenizerError, match="fails on this text: Onig"):
            await tokenizer.encode("a" * 40 + "b")
        assert await tokenizer.encode("hello") == HELLO
        assert the_child().pid == child, "a panic leaves nothing broken"

    run(save_tokenizer(tmp_path, panicking_tokenizer()), WIDE, use)
    assert capfd.readouterr().err == "", "a panic's own message may quote the text"


def test_a_decoder_that_panics_costs_one_text() -> None:
    backend = byte_level()
    backend.decoder = decoders.Strip("h", 0, 9)
    tokenizer = Tokenizer(backend)
    assert tokenizer.decode([261]) == "hello"
    with pytest.raises(TokenizerError, match="cannot decode these tokens"):
        tokenizer.decode([backend.token_to_id("h")])


def test_memory_is_watched_where_the_system_does_not_bound_it(tmp_path: Path) -> None:
    """The process's own limit is higher here than that of the worker that watches its memory."""
    directory = str(save_with_template(tmp_path, "{% set s = 'a' * n * 10 ** 9 %}{{ (n + 8) ** 10 ** 8 }}"))

    process = TextProcess(Start(directory, 60, 2**32, 2**32), memory_limit=64 * MIB)
    process.load()
    with pytest.raises(ProcessFailed) as failed:
        process.run_call(sandbox.serialize_call(chat(n=1)))
    assert failed.value.reason == "memory"
    process.end()


# ---------------------------------------------------------------- processes that end
def test_who_waits_is_answered_when_the_process_is_killed(tmp_path: Path) -> None:
    async def use(tokenizer: SandboxedTokenizer) -> None:
        for _ in range(3):
            calls = [asyncio.create_task(tokenizer.encode("hello " * 5000)) for _ in range(8)]
            await asyncio.sleep(0)  # all wait, and the first is asked
            the_child().kill()
            assert len({tuple(ids) for ids in await asyncio.gather(*calls)}) == 1
        the_child().kill()  # while it has nothing to do
        assert await tokenizer.encode("hello") == HELLO

    run(save_tokenizer(tmp_path, byte_level()), WIDE, use)


def test_it_is_deaf_to_signals(tmp_path: Path) -> None:
    """Those of a service manager to all processes; it is not in the group that Ctrl-C interrupts."""

    async def use(tokenizer: SandboxedTokenizer) -> None:
        child = the_child()
        assert os.getpgid(child.pid) != os.getpgid(0)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            child.send_signal(number)
        assert await tokenizer.encode("hello") == HELLO
        assert the_child().pid == child.pid

    run(save_tokenizer(tmp_path, byte_level()), WIDE, use)


def test_it_ends_with_a_worker_that_is_killed(tmp_path: Path) -> None:
    """While it waits at once, and in the middle of a call when its time is over; on Linux also if it is stopped."""
    program = """
import asyncio, os, sys
from pathlib import Path
from server.text.processes import sandbox
from server.text.processes.messages import EncodeChat

async def main():
    async with sandbox.SandboxedTokenizer(Path(sys.argv[1]), sandbox.CallLimits(1.0, 2**28)) as tokenizer:
        bomb = EncodeChat([{"role": "user", "content": "x"}], 1000, variables={"n": 1})
        if sys.argv[2] == "busy":
            asyncio.create_task(tokenizer.encode_chat(bomb))
            await asyncio.sleep(0.01)
        print("ready", flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""
    directory = save_with_template(tmp_path, TEMPLATES["a power"])
    for state in ("idle", "busy", *(["stopped"] if sys.platform == "linux" else [])):
        command = [sys.executable, "-c", program, str(directory), state]
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as worker:
            assert worker.stdout is not None
            assert worker.stdout.readline() == b"ready\n"
            family = psutil.Process(worker.pid).children()
            assert len(family) == 1
            if state == "stopped":
                family[0].suspend()
            worker.kill()
        assert not psutil.wait_procs(family, timeout=30)[1]


def test_nothing_is_left_of_many_processes(tmp_path: Path) -> None:
    async def use(tokenizer: SandboxedTokenizer) -> None:
        await tokenizer.encode("hello")
        files = set[int]()
        for i in range(6):
            the_child().kill()
            assert await tokenizer.encode("hello") == HELLO
            files |= {psutil.Process().num_fds()} if i > 1 else set()
        assert len(files) == 1
        assert len(children()) == 1

    run(save_tokenizer(tmp_path, byte_level()), WIDE, use)
    assert not children()


def test_it_has_no_file_of_the_workers(tmp_path: Path) -> None:
    async def use(tokenizer: SandboxedTokenizer) -> None:
        await tokenizer.encode("hello")
        assert the_child().open_files() == []
        assert len(the_child().net_connections(kind="all")) <= 2, "its end of the socket, known by two descriptors"
        assert the_child().num_fds() == 4

    with (tmp_path / "open").open("w") as opened:
        os.set_inheritable(opened.fileno(), True)
        run(save_tokenizer(tmp_path / "model", byte_level()), WIDE, use)


# ---------------------------------------------------------------- processes that wait for the machine
def many_words() -> tokenizers.Tokenizer:
    """Return a tokenizer that takes half a second of CPU time to load."""
    words = {f"word {i}": i for i in range(150_000)}
    return tokenizers.Tokenizer(models.WordLevel(words, unk_token="word 0"))


@pytest.mark.parametrize("role", ["texts", "grammars"])
def test_a_call_may_wait_for_the_machine(tmp_path: Path, role: str) -> None:
    """A process that stands still for longer than a call may take has not used the time of the call."""

    async def use(tokenizer: SandboxedTokenizer) -> None:
        regex = await tokenizer.check_grammar(Constraint("regex", "a+", ""))
        child = the_child(role)
        child.suspend()
        texts, grammar = tokenizer.encode("hello"), tokenizer.check_grammar(Constraint("regex", "b+", ""))
        calls = asyncio.gather(texts, grammar)
        await asyncio.sleep(3 * TIGHT.seconds)
        assert not calls.done()
        child.resume()
        assert await calls == [HELLO, regex.replace("a+", "b+")]
        assert the_child(role).pid == child.pid

    run(save_tokenizer(tmp_path, byte_level()), TIGHT, use, grammar_limits=TIGHT)


def test_a_process_that_no_longer_works_is_replaced(tmp_path: Path) -> None:
    """A text is then answered by another process; a grammar is refused, but may be sent again."""

    async def use(tokenizer: SandboxedTokenizer) -> None:
        assert await tokenizer.check_grammar(Constraint("regex", "b+", "")), "both processes have loaded"
        stuck = [the_child(role) for role in ("texts", "grammars")]
        for child in stuck:
            child.suspend()
        assert await tokenizer.encode("hello") == HELLO
        with pytest.raises(TextUnavailable, match="at the moment"):
            await tokenizer.check_grammar(Constraint("regex", "a+", ""))
        assert await tokenizer.check_grammar(Constraint("regex", "a+", ""))
        assert not any(child.is_running() for child in stuck)

    run(save_tokenizer(tmp_path, byte_level()), WIDE, use, grammar_limits=WIDE, stall_seconds=2.0)


def test_grammars_find_a_process_that_has_loaded(tmp_path: Path) -> None:
    """It loads the model's tokens without a call, to whose time this does not count, and again after a crash."""
    short = CallLimits(0.1, 64 * MIB)  # less than loading takes: about half a second

    async def use(tokenizer: SandboxedTokenizer) -> None:
        assert await tokenizer.check_grammar(Constraint("regex", "word 7", ""))
        for number in range(2):
            child = the_child("grammars")
            assert await tokenizer.check_grammar(Constraint("regex", f"word {number}", ""))
            assert sum(child.cpu_times()[:2]) > short.seconds
            child.kill()
            with pytest.raises(GrammarError):
                await tokenizer.check_grammar(Constraint("regex", f"({number}", ""))

    run(save_tokenizer(tmp_path, many_words()), WIDE, use, grammar_limits=short)


def test_loading_is_bounded_by_its_cpu_time(tmp_path: Path) -> None:
    directory = str(save_tokenizer(tmp_path, many_words()))
    process = TextProcess(Start(directory, 60, 2**30, 2**32, load_seconds=0.02))
    with pytest.raises(SettingsError, match=r"^model: the tokenizer in .* takes more than 0\.02 s of CPU time to load"):
        process.load()
    assert process.end() == -signal.SIGPROF


# ---------------------------------------------------------------- callers that go, and too many of them
def test_cancelled_calls_leave_no_trace(tmp_path: Path) -> None:
    print(f"seed {(seed := random.randrange(2**32))}")
    rng = random.Random(seed)
    words = [f"hello {i}" for i in range(200)]

    async def use(tokenizer: SandboxedTokenizer) -> None:
        here = Tokenizer(byte_level())
        for _ in range(5):
            calls = [asyncio.create_task(tokenizer.encode(word)) for word in words]
            await asyncio.sleep(rng.random() * 0.02)
            gone = {i for i in range(len(calls)) if rng.random() < 0.5 and calls[i].cancel()}
            for i, found in enumerate(await asyncio.gather(*calls, return_exceptions=True)):
                assert isinstance(found, asyncio.CancelledError) if i in gone else found == await here.encode(words[i])

    run(save_tokenizer(tmp_path, byte_level()), WIDE, use)


def test_a_call_that_is_cancelled_in_the_middle_is_still_bounded(tmp_path: Path) -> None:
    async def use(tokenizer: SandboxedTokenizer) -> None:
        child = the_child().pid
        bomb = asyncio.create_task(tokenizer.encode_chat(chat(n=1)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        bomb.cancel()
        assert await tokenizer.encode("hello") == HELLO
        assert the_child().pid != child

    run(save_with_template(tmp_path, TEMPLATES["a power"]), TIGHT, use)


def test_more_calls_than_may_wait(tmp_path: Path) -> None:
    start = partial(TextProcess, Start(str(save_tokenizer(tmp_path, byte_level())), 60, 2**30, 2**32))
    small, large = sandbox.serialize_call(Encode("x", True)), sandbox.serialize_call(Encode("x" * 10_000, True))

    async def use() -> None:
        queue = CallQueue(start, max_calls=3, max_bytes=5000)
        calls = [asyncio.create_task(queue.run_call(small)) for _ in range(3)]
        await asyncio.sleep(0)
        for request in (small, large):
            with pytest.raises(TextUnavailable, match="too many texts"):
                await queue.run_call(request)
        calls[2].cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await queue.run_call(large)  # alone it may
        await queue.close()
        with pytest.raises(TextUnavailable):
            await queue.run_call(small)

    asyncio.run(use())


def test_a_model_that_is_gone_is_reported_and_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.text.processes.sandbox.RESTART_DELAY", 0.0)
    directory = save_tokenizer(tmp_path / "model", byte_level())

    async def use(tokenizer: SandboxedTokenizer) -> None:
        directory.rename(tmp_path / "elsewhere")
        the_child().kill()
        with pytest.raises(TextUnavailable, match="at the moment"):
            await tokenizer.encode("hello")
        (tmp_path / "elsewhere").rename(directory)
        assert await tokenizer.encode("hello") == HELLO

    run(directory, WIDE, use)


# ---------------------------------------------------------------- files that cannot be loaded
def edited(directory: Path, **changes: Any) -> Path:
    file = save_tokenizer(directory, byte_level()) / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return directory


def replacing(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decoder": replacing({"Regex": "(a+)+$"}, "")}, "a regular expression"),
        ({"decoder": {"type": "Sequence", "decoders": [replacing({"String": "a"}, "aaaa")] * 4}}, "64 times longer"),
        ({"decoder": replacing({"String": ""}, "x" * 100)}, "64 times longer"),
        ({"decoder": {"type": "Sequence", "decoders": [{"type": "Fuse"}] * 20}}, "20 steps"),
    ],
    ids=str,
)
def test_decoders_that_may_take_any_time_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=f"^model: .*{message}"):
        SandboxedTokenizer(edited(tmp_path, **changes), WIDE)
    assert not children()


@pytest.mark.parametrize("vocab", [{"a": 2**32 - 1}, {"a" * 10_000: 0}], ids=["id", "token"])
def test_tokens_that_are_absurd(tmp_path: Path, vocab: dict[str, int]) -> None:
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "a"}
    with pytest.raises(SettingsError, match=r"^model: its tokenizer has (a|the) token"):
        SandboxedTokenizer(edited(tmp_path, model=model, added_tokens=[], post_processor=None), WIDE)


def test_files_that_take_all_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "LOAD_MEMORY", 20 * MIB)
    backend = byte_level()
    backend.add_tokens([f"token-{i}" for i in range(100_000)])
    with pytest.raises(SettingsError, match=r"^model: the tokenizer in .* (takes more than|ends the process)"):
        SandboxedTokenizer(save_tokenizer(tmp_path, backend), WIDE)
    assert not children()


def test_a_directory_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"no tokenizer\.json; is it the directory of a model"):
        SandboxedTokenizer(tmp_path, WIDE)


@pytest.fixture(autouse=True)
def _no_process_is_left() -> Iterator[None]:
    yield
    assert not children()
    assert not children("grammars")


def test_normalizers_are_no_matter_of_decoding() -> None:
    """A regular expression that only encoding uses is bounded by the process."""
    backend = byte_level()
    backend.normalizer = normalizers.Replace(Regex(" +"), " ")
    assert Tokenizer(backend).decode([261]) == "hello"
