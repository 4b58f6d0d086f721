"""The process that encodes texts with a model's own tokenizer and chat templates, or that checks grammars.

`python -m server.text.processes.sandbox_process`: its standard input is the socket to its worker. It loads what the
first message names, and then answers calls one at a time. The code it runs came with the model, and grammars come from
clients, so the kernel bounds both: the address space by RLIMIT_AS, and the CPU time of a call by a timer, which ends
the process even if its worker has ended. The limit is one of CPU time, as a busy machine makes a call wait but hardly
adds to its CPU time. Knows neither requests nor the engine.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from config.errors import SettingsError
from server.processes.framing import FrameDecoder, encode_frame
from server.processes.linux import die_with_parent, return_freed_memory
from server.text.encoder import Encoder
from server.text.errors import TextRefused, shorten_message, wrap_tokenizer_error
from server.text.processes.messages import (
    REFUSAL_ERRORS,
    Answer,
    Broken,
    Call,
    ChatDefaults,
    CheckGrammar,
    Encoded,
    ProcessMessage,
    Refused,
    Start,
    TokenizerLoaded,
    VocabularyData,
)
from server.text.vocabulary import Vocabulary

CHUNK = 2**18  # most bytes read from the socket at a time
MAX_OPEN_FILES = 16  # most open files once the tokenizer is loaded
KINDS = {error: kind for kind, error in REFUSAL_ERRORS.items()}


def main() -> None:
    die_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # ignored: only the worker ends this process
        signal.signal(number, signal.SIG_IGN)
    with socket.socket(fileno=os.dup(0)) as connection, contextlib.suppress(OSError):  # no worker, or no call for long
        serve(connection)
    os._exit(0)  # skips the interpreter's cleanup, which takes time and has nothing to save


class Loaded(NamedTuple):
    """What answers the calls of the process."""

    answer: Callable[[Call], Encoded]  # raises TextRefused
    vocabulary_data: VocabularyData | None = None  # of a tokenizer


def serve(connection: socket.socket) -> None:
    """Load what the first message names, then answer calls until the worker closes its end of the socket."""
    messages = receive_messages(connection)
    start = next(messages, None)
    if not isinstance(start, Start):
        return
    redirect_stderr()
    limit_memory(start.load_memory)
    with limit_cpu_time(start.load_seconds):
        loaded = load(start)
    if isinstance(loaded, Broken):
        return send(connection, loaded)
    gc.collect()
    gc.freeze()
    return_freed_memory()
    limit_resources(start.memory)
    if start.stack:
        limit_stack(start.stack)
    connection.settimeout(start.linger)
    send(connection, TokenizerLoaded(loaded.vocabulary_data if start.with_vocabulary else None))
    for call in messages:
        assert not isinstance(call, Start), "Start is only the first message"
        with limit_cpu_time(start.seconds):
            answer = answer_call(loaded, call)
        send(connection, answer)
        if isinstance(answer, Refused) and answer.kind == "memory":
            return None  # ends the process: after a MemoryError its state is unknown


def receive_messages(connection: socket.socket) -> Iterator[Start | Call]:
    """Yield the worker's messages until there are no more. Unpickling is safe: only the worker can write."""
    frames: FrameDecoder[Start | Call] = FrameDecoder(pickle.loads)
    while data := connection.recv(CHUNK):
        yield from frames.feed(data)


def send(connection: socket.socket, message: ProcessMessage) -> None:
    connection.sendall(encode_frame(msgspec.msgpack.encode(message)))


def load(start: Start) -> Loaded | Broken:
    """Return what answers calls, or Broken with the reason if the model's files or tokens cannot be used."""
    try:
        return load_encoder(start.source, start.chat) if isinstance(start.source, str) else load_checker(start.source)
    except SettingsError as error:
        return Broken(str(error))
    except MemoryError:
        return Broken(f"model: {start.source_name} takes more than {start.load_memory} bytes to load")
    except Exception as error:  # files of an unexpected form may raise any exception
        return Broken(f"model: {start.source_name} cannot be read: {type(error).__name__}: {error}")


def load_encoder(directory: str, chat: ChatDefaults) -> Loaded:
    """Return the tokenizer of a model's directory."""
    encoder = Encoder.from_directory(Path(directory), chat)
    return Loaded(encoder.answer, encoder.vocabulary_data)


def load_checker(vocabulary: bytes) -> Loaded:
    """Return the checker of grammars for a model's tokens, which come as the msgpack of a VocabularyData."""
    from server.grammar.matcher import GrammarChecker  # llguidance takes 50 ms and 8 MB to import

    checker = GrammarChecker(Vocabulary(msgspec.msgpack.decode(vocabulary, type=VocabularyData)))

    def answer(call: Call) -> Encoded:
        assert isinstance(call, CheckGrammar), "texts have another process"
        return Encoded(text=checker.check(call.kind, call.text))

    return Loaded(answer)


def answer_call(loaded: Loaded, call: Call) -> Answer:
    try:
        return loaded.answer(call)
    except TextRefused as error:
        return Refused(KINDS.get(type(error), "tokenizer"), str(error))
    except MemoryError:
        return Refused("memory", "")
    except BaseException as error:
        return Refused("tokenizer", shorten_message(wrap_tokenizer_error(error)))


# ---------------------------------------------------------------- limits
def redirect_stderr() -> None:
    """Redirect stderr to /dev/null: the message of a panic may quote a text."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)


def limit_resources(memory: int) -> None:
    """Allow only what calls need: `memory` bytes beyond those in use, few open files, no writes, no core dump."""
    limit_memory(memory, for_good=True)
    for kind, limit in (
        (resource.RLIMIT_NOFILE, MAX_OPEN_FILES),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (limit, limit))


@contextlib.contextmanager
def limit_cpu_time(seconds: float) -> Iterator[None]:
    """Bound the CPU time of the `with` block: SIGPROF ends a process that takes more."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def limit_stack(size: int) -> None:
    """Bound the stack to `size` bytes; a call that needs more ends the process."""
    _, hard = resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(resource.RLIMIT_STACK, (size if hard == resource.RLIM_INFINITY else min(size, hard), hard))


def limit_memory(allowance: int, *, for_good: bool = False) -> None:
    """Bound the address space to `allowance` bytes more than now; `for_good`: the limit cannot be raised again.

    macOS does not enforce the limit; there the worker watches the memory of a call.
    """
    if (in_use := read_address_space()) is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = in_use + allowance if hard == resource.RLIM_INFINITY else min(in_use + allowance, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit if for_good else hard))


def read_address_space() -> int | None:
    """Return the bytes of address space in use; None where the system has no /proc."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return None


if __name__ == "__main__":
    main()
