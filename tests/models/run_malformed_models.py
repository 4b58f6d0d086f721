"""Try malformed models, MOST cases of each source.

`python -m tests.models.run_malformed_models SEED FOLDER KIND:MOST:SOURCE ...`

A process of its own, as a case may crash it: prints a line of JSON before each case and one after it. Loads what the
engine and the workers load, by the same calls.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor

from config.errors import SettingsError
from kernels.backends import list_backends
from kernels.ops import Ops
from kernels.reference.backend import ReferenceOps
from server.models.files.directory import locate
from server.models.load import load_model, read_model_info
from server.models.no_cache import NoCacheAttention
from server.models.weights import WeightFormat, WeightsConfig
from server.text.tokenizer import Tokenizer
from tests.models import malformed_models
from tests.models.malformed_models import Case

ROOM = 2 << 30  # bytes of address space that a case may take
SECONDS = 30  # for one case; it takes a hundredth of one
KEPT = (
    WeightsConfig(torch.float32, as_stored=True),
    WeightsConfig(torch.bfloat16),
    WeightsConfig(torch.float32, WeightFormat("int8", "Q8_0", "Q8_0")),
)
CPU = torch.device("cpu")


class Served(NamedTuple):
    logits: Tensor
    ends: frozenset[int]
    vocab_size: int


def cases_of(kind: str, source: Path, random: Random) -> Iterator[Case]:
    match kind:
        case "config":
            yield from malformed_models.size_cases()
            yield from malformed_models.json_cases(source, "config.json", malformed_models.HARMLESS)
        case "transformers":
            yield from malformed_models.json_cases(source, "config.json")
        case "safetensors":
            yield from malformed_models.header_cases(source, random)
            yield from malformed_models.index_cases(source)
            yield from malformed_models.json_cases(source, "generation_config.json")
        case "header":
            yield from malformed_models.header_cases(source, random)
        case "tensors":
            yield from malformed_models.tensor_cases(source, random, most=4)
        case "shapes":  # transformers takes numbers of any type
            cases = malformed_models.tensor_cases(source, random, most=4)
            yield from (case for case in cases if ": torch." not in case.name)
        case "tokenizer":
            for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
                yield from malformed_models.json_cases(source, name)
        case "gguf":
            yield from malformed_models.gguf_cases(source, random)


def main(seed: str, folder: Path, batches: Sequence[str]) -> None:
    torch.set_num_threads(1)
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    ops = next((backend.load() for backend in list_backends("cpu") if backend.missing is None), ReferenceOps())
    _limit_memory()
    signal.signal(signal.SIGALRM, _too_long)
    before = _peak()
    for batch in batches:
        kind, most, source = batch.split(":", 2)
        _run(kind, Path(source), Random(seed), int(most), folder, ops)
    print(json.dumps({"took": _peak() - before}))


def _run(kind: str, source: Path, random: Random, most: int, folder: Path, ops: Ops) -> None:
    """Try so many cases of a kind, on copies of `source`."""
    expected = _served(str(source), ops, KEPT[0])
    cases = list(cases_of(kind, source, random))
    kinds = KEPT if kind != "transformers" else KEPT[:1]
    for number, case in enumerate(random.sample(cases, min(most, len(cases)))):
        print(json.dumps({"case": f"{kind} of {source.name}: {case.name}"}), flush=True)
        place = folder / str(number) / source.name
        place.parent.mkdir()
        shutil.copytree(source, place) if source.is_dir() else shutil.copy(source, place)
        case.spoil(place)
        kept = KEPT[0] if case.expected == "same" else random.choice(kinds)
        signal.alarm(SECONDS)
        print(json.dumps({"fault": _fault(case, place, ops, kept, expected)}), flush=True)
        signal.alarm(0)
        shutil.rmtree(place.parent)
        shutil.rmtree(folder / "cache", ignore_errors=True)


def _peak() -> int:
    """Return the most bytes of memory this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _fault(case: Case, place: Path, ops: Ops, kept: WeightsConfig, expected: Served) -> str | None:
    """What is wrong with what happened; None: nothing."""
    try:
        served = _served(str(place), ops, kept)
    except SettingsError as error:
        words = str(error)
        if len(words.splitlines()) != 1 or len(words) > 1000:
            return f"not one line: {words!r}"
        if str(place) not in words:
            return f"names no file: {words}"
        return f"refused: {words}" if case.expected == "same" else None
    except BaseException as error:
        return f"raises {type(error).__name__}: {error}"
    if case.expected == "refused":
        return "is served"
    if not all(0 <= end < served.vocab_size for end in served.ends):
        return f"ends with {served.ends}"
    if case.finite and not served.logits.isfinite().all():
        return "gives logits that are not numbers"
    if case.expected == "same" and not torch.allclose(served.logits, expected.logits, atol=1e-5, rtol=0):
        return "gives other logits"
    return None


@torch.inference_mode()
def _served(model: str, ops: Ops, kept: WeightsConfig) -> Served:
    directory = locate(model)
    Tokenizer.from_directory(directory)
    facts = read_model_info(directory, "auto")
    positions = min(facts.max_positions, 256)
    loaded = load_model(directory, "auto", ops=ops, dtype=torch.float32, weights=kept, device=CPU, positions=positions)
    ids = torch.arange(2, 2 + min(12, positions)) % facts.vocab_size
    attention = NoCacheAttention(loaded.layer_specs, len(ids), CPU)
    attention.logit_index = attention.positions
    return Served(loaded.forward(ids, attention), facts.eos_ids, facts.vocab_size)


def _limit_memory() -> None:
    status: Mapping[str, str] = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    taken = int(status["VmSize"].split()[0]) * 1024
    resource.setrlimit(resource.RLIMIT_AS, (taken + ROOM, resource.RLIM_INFINITY))


def _too_long(*_: Any) -> None:
    raise TimeoutError(f"takes more than {SECONDS} seconds")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
