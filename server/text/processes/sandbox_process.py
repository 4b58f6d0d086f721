"""The process that encodes texts with a model's own tokenizer and chat templates.

`python -m server.text.processes.sandbox_process`: its standard input is the socket to its worker. It loads the
tokenizer that the first message names, and then answers calls one at a time. The code it runs came with the model, so
the kernel bounds it: its address space by RLIMIT_AS, and the time of a call by an alarm, which ends the process even if
its worker has ended. Knows neither requests nor the engine.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import resource
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec

from config.errors import SettingsError
from server.processes.framing import FrameDecoder, encode_frame
from server.processes.parent_death import die_with_parent
from server.text.encoder import Encoder
from server.text.errors import TextRefused, shorten_message, wrap_tokenizer_error
from server.text.processes.messages import (
    REFUSAL_ERRORS,
    Answer,
    Broken,
    Call,
    ProcessMessage,
    Refused,
    Start,
    TokenizerLoaded,
)

CHUNK = 2**18  # most bytes read from the socket at a time
MAX_OPEN_FILES = 16  # most open files once the tokenizer is loaded
KINDS = {error: kind for kind, error in REFUSAL_ERRORS.items()}


def main() -> None:
    die_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # ignored: only the worker ends this process
        signal.signal(number, signal.SIG_IGN)
    with socket.socket(fileno=os.dup(0)) as connection, contextlib.suppress(OSError):  # OSError: the worker has ended
        serve(connection)
    os._exit(0)  # skips the interpreter's cleanup, which takes time and has nothing to save


def serve(connection: socket.socket) -> None:
    """Load the tokenizer, then answer calls until the worker closes its end of the socket."""
    messages = receive_messages(connection)
    start = next(messages, None)
    if not isinstance(start, Start):
        return
    redirect_stderr()
    limit_memory(start.load_memory)
    loaded = load_encoder(start)
    if isinstance(loaded, Broken):
        return send(connection, loaded)
    gc.collect()
    gc.freeze()
    limit_resources(start.memory)
    if start.stack:
        limit_stack(start.stack)
    send(connection, TokenizerLoaded(loaded.vocabulary_data if start.with_vocabulary else None))
    for call in messages:
        assert not isinstance(call, Start), "Start is only the first message"
        answer = answer_with_timeout(start.seconds, loaded, call)
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


def load_encoder(start: Start) -> Encoder | Broken:
    """Return the encoder for the model's directory, or Broken with the reason if its files cannot be used."""
    try:
        return Encoder.from_directory(Path(start.directory))
    except SettingsError as error:
        return Broken(str(error))
    except MemoryError:
        return Broken(f"model: the tokenizer in {start.directory} takes more than {start.load_memory} bytes to load")
    except Exception as error:  # files of an unexpected form may raise any exception
        return Broken(f"model: the tokenizer in {start.directory} cannot be read: {type(error).__name__}: {error}")


def answer_with_timeout(seconds: float, encoder: Encoder, call: Call) -> Answer:
    """Return the answer to a call. If it takes more than `seconds`, SIGALRM ends the process."""
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return answer_call(encoder, call)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def answer_call(encoder: Encoder, call: Call) -> Answer:
    try:
        return encoder.answer(call)
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
