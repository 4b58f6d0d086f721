"""Malformed models: every way to spoil one field of a valid directory or GGUF file, by name.

A case is a function that changes a copy, with the outcome that must follow. `run_malformed_models.py` runs the cases.
Random values come from the generator that a case is given.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import struct
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Literal, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models.gguf_fields import ARRAY, STRING, RawGGUF, parse

Expected = Literal["refused", "same", "any"]  # "any": refused in words, or logits that are numbers

NAN, INFINITY = float("nan"), float("inf")
BIG = 10**9
VALUES = (  # of any key
    *(None, -1, 0, 1, 1.5, 0.0, -1.0, 1e-300, 1e300, True, False, "", "a", "a\nb", [], {}, [None], {"a": {}}),
    *(BIG, 2**31, 2**32 - 1, 2**64, 10**400, NAN, INFINITY, -INFINITY, [[[]]], [-1], [BIG], ["a"]),
)
MISSING = object()
HARMLESS = ("transformers_version", "initializer_range", "use_cache", "bos_token_id", "pad_token_id", "model_type")
TEXTS = (b"", b"\0", b"null", b"[]", b"{", b'"a"', b"\xff\xfe{}", b"[" * 200_000, b'{"a":' * 200_000, b"{} {}", b"NaN")
SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")


class Case(NamedTuple):
    name: str
    spoil: Callable[[Path], None]  # a directory, or a GGUF file
    expected: Expected = "any"
    finite: bool = True  # if it is served: the logits are numbers


# ---------------------------------------------------------------- JSON
def json_cases(source: Path, name: str, harmless: Collection[str] = ()) -> Iterator[Case]:
    """Every key of a JSON object, and the file itself; what `harmless` keys say changes nothing."""
    for i, text in enumerate(TEXTS):
        yield Case(f"{name}: text {i}", partial(_write, name, text))
    yield Case(f"{name}: a folder", partial(_make_folder, name))
    raw = json.loads((source / name).read_text())
    for path, value in _paths(raw):
        where = ".".join(map(str, path))
        for new in (MISSING, *VALUES, *_near(value)):
            told = "missing" if new is MISSING else repr(new)[:40]
            expected: Expected = "same" if path[0] in harmless else "any"
            yield Case(f"{name}: {where} is {told}", partial(_set, name, path, new), expected)


def size_cases() -> Iterator[Case]:
    """Sizes that the tensors do not have."""
    for key in (*SIZES, "intermediate_size"):
        for factor, change in ((1, 1), (1, -1), (2, 0), (10**7, 0)):
            name = f"config.json: {key} * {factor} + {change}"
            if not (key == "num_hidden_layers" and change == -1):  # what is left over is left alone
                yield Case(name, partial(_scale, key, factor, change), "refused")


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every place within a JSON value; of long lists and objects, the first ones."""
    if path:
        yield path, value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items)[: None if not path else 3]:
        yield from _paths(inner, (*path, key))


def _near(value: Any) -> tuple[Any, ...]:
    if type(value) is int:
        return value + 1, value - 1, -value, value * 1000, float(value), str(value)
    if isinstance(value, list) and value:
        return [*value, value[-1]], value[:-1], value[0], value * 1000
    return (f"{value} ", value.upper(), [value]) if isinstance(value, str) else ()


def _write(name: str, text: bytes, directory: Path) -> None:
    (directory / name).write_bytes(text)


def _make_folder(name: str, directory: Path) -> None:
    (directory / name).unlink()
    (directory / name).mkdir()


def _set(name: str, path: tuple[Any, ...], new: Any, directory: Path) -> None:
    raw = json.loads((directory / name).read_text())
    place = raw
    for key in path[:-1]:
        place = place[key]
    if new is MISSING:
        del place[path[-1]]
    else:
        place[path[-1]] = new
    (directory / name).write_text(json.dumps(raw))


def _scale(key: str, factor: int, change: int, directory: Path) -> None:
    raw = json.loads((directory / "config.json").read_text())
    default = raw["hidden_size"] // raw["num_attention_heads"] if key == "head_dim" else raw["num_attention_heads"]
    _set("config.json", (key,), (raw.get(key) or default) * factor + change, directory)


# ---------------------------------------------------------------- tensors of safetensors
def tensor_cases(source: Path, random: Random, most: int) -> Iterator[Case]:
    """The tensors of the first layer and outside of layers, and some others: in another shape or type, or gone."""
    tensors = load_file(source / "model.safetensors")
    names = [name for name in tensors if ".layers." not in name or ".layers.0." in name]
    others = sorted(set(tensors) - set(names))
    for name in names + random.sample(others, min(most, len(others))):
        for told, change in SHAPES.items():
            if tuple((new := change(tensors[name])).shape) != tuple(tensors[name].shape):
                yield Case(f"{name}: {told} {list(new.shape)}", partial(_replace, name, change), "refused")
        yield Case(f"{name}: missing", partial(_replace, name, lambda _: None), "refused")
        for dtype in (torch.int32, torch.bool, torch.uint8, torch.float8_e4m3fn, torch.int64):
            if dtype != tensors[name].dtype:
                yield Case(f"{name}: {dtype}", partial(_replace, name, partial(_as, dtype)), "refused")
        if tensors[name].is_floating_point():
            yield from _number_cases(name, tensors[name])


def _number_cases(name: str, tensor: Tensor) -> Iterator[Case]:
    for dtype in (torch.float16, torch.float64):
        yield Case(f"{name}: {dtype}", partial(_replace, name, partial(_as, dtype)))
    for number in (NAN, INFINITY, -INFINITY):
        expected: Expected = "refused" if tensor.dim() == 1 else "any"
        yield Case(f"{name}: one {number}", partial(_replace, name, partial(_with_one, number)), expected, finite=False)


SHAPES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "empty": lambda t: t[:0],
    "empty, flat": lambda t: t.flatten()[:0],
    "narrower to nothing": lambda t: t[..., :0],
    "shorter": lambda t: t[:-1],
    "half": lambda t: t[: len(t) // 2],
    "longer": lambda t: torch.cat((t, t[:1])),
    "twice": lambda t: torch.cat((t, t)),
    "narrower": lambda t: t[..., :-1],
    "wider": lambda t: torch.cat((t, t[..., :1]), -1),
    "transposed": lambda t: t.T if t.dim() == 2 else t,
    "one dimension more": lambda t: t[None],
    "one dimension more behind": lambda t: t[..., None],
    "flat": lambda t: t.flatten(),
    "one number": lambda t: t.flatten()[0],
}


def _replace(name: str, change: Callable[[Tensor], Tensor | None], directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    new = change(tensors.pop(name))
    save_file(tensors | ({} if new is None else {name: new.contiguous().clone()}), directory / "model.safetensors")


def _as(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    return (tensor.float() if tensor.dtype == torch.uint32 else tensor).to(dtype)


def _with_one(number: float, tensor: Tensor) -> Tensor:
    changed = tensor.clone()
    changed.view(-1)[len(changed) // 2] = number
    return changed


# ---------------------------------------------------------------- the header of safetensors
def header_cases(source: Path, random: Random) -> Iterator[Case]:
    data = (source / "model.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    write = partial(_write, "model.safetensors")
    for length in (0, 1, 7, size - 1, size + 1, len(data), 10**8 + 1, 2**31, 2**63, 2**64 - 1):
        yield Case(f"header of {length} bytes", partial(write, length.to_bytes(8, "little") + data[8:]), "refused")
    for end in (0, 4, 8, 8 + size // 2, 8 + size, len(data) - 1, *random.sample(range(len(data)), 6)):
        yield Case(f"cut off at {end}", partial(write, data[:end]), "refused")
    yield Case("bytes behind the last", partial(write, data + b"\0" * 64), "refused")
    yield Case("missing", partial(_remove, "model.safetensors"), "refused")
    yield Case("a folder", partial(_make_folder, "model.safetensors"), "refused")
    for text in TEXTS:
        yield Case(f"header {text[:9]!r}", partial(write, _safetensors(text, data[8 + size :])), "refused")
    for name in random.sample([key for key in header if key != "__metadata__"], 4):
        for key, values in FIELDS.items():
            for value in values:
                changed = header | {name: header[name] | {key: value}}
                if changed != header:
                    text = json.dumps(changed).encode()
                    case = f"{name}: {key} is {value!r}"
                    yield Case(case, partial(write, _safetensors(text, data[8 + size :])), "refused")
        double = json.dumps(header)[:-1] + f', "{name}": {json.dumps(header[name] | {"shape": [1]})}}}'
        yield Case(f"{name}: twice", partial(write, _safetensors(double.encode(), data[8 + size :])), "refused")
        yield Case(f"{name}: in two files", partial(_copy_tensor, name, "other.safetensors"), "same")
    yield from (
        Case(f"bytes {i}", partial(_flip, "model.safetensors", Random(random.random()), size)) for i in range(9)
    )


FIELDS: Mapping[str, tuple[Any, ...]] = {
    "dtype": (None, "", "F99", "F64", "I8", 7, [], "BOOL", "f32"),
    "shape": (None, [], [0], [-1], [1], [2**63, 2], [2**32, 2**32], [1.5], ["a"], 7, "a", [10**30], [True]),
    "data_offsets": (None, [], [0], [0, 1], [1, 0], [-4, 0], [0, 2**63], [2**64 - 1, 2**64], ["a", "b"], [0, 0], 7),
}


def index_cases(source: Path) -> Iterator[Case]:
    """An index beside one file of shards, and beside the whole file, where it does not count."""
    names = list(load_file(source / "model.safetensors"))
    right = dict.fromkeys(names, SHARD)
    indexes: dict[str, tuple[Any, Expected]] = {
        "right": ({"weight_map": right}, "same"),
        "a file that is missing": ({"weight_map": right | {names[0]: "missing.safetensors"}}, "refused"),
        "a tensor that is missing": ({"weight_map": right | {"nonesuch": SHARD}}, "same"),
        "out of the folder": ({"weight_map": right | {names[0]: "../../../etc/passwd"}}, "refused"),
        "no name": ({"weight_map": dict.fromkeys(names, "")}, "refused"),
        "NUL": ({"weight_map": dict.fromkeys(names, "a\0b")}, "refused"),
        "a long name": ({"weight_map": dict.fromkeys(names, "a" * 5000)}, "refused"),
        "no names": ({"weight_map": {}}, "refused"),
        "a list": ({"weight_map": []}, "refused"),
        "numbers": ({"weight_map": dict.fromkeys(names, 1)}, "refused"),
        "nothing": ({}, "refused"),
        "no object": ([], "refused"),
    }
    for told, (index, expected) in indexes.items():
        yield Case(f"index: {told}", partial(_write_index, json.dumps(index).encode()), expected)
        same: Expected = "refused" if told == "out of the folder" else "same"
        yield Case(f"no index: {told}", partial(_write, INDEX, json.dumps(index).encode()), same)
    yield Case("index: no JSON", partial(_write_index, b"{"), "refused")


SHARD, INDEX = "model-00001-of-00001.safetensors", "model.safetensors.index.json"


def _write_index(text: bytes, directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / SHARD)
    _write(INDEX, text, directory)


def _safetensors(header: bytes, rest: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + rest


def _remove(name: str, directory: Path) -> None:
    (directory / name).unlink()


def _copy_tensor(name: str, file: str, directory: Path) -> None:
    save_file({name: load_file(directory / "model.safetensors")[name]}, directory / file)


def _flip(name: str, random: Random, most: int, directory: Path) -> None:
    """Changes some bytes before the place `most`."""
    file = directory / name if name else directory
    data = bytearray(file.read_bytes())
    for _ in range(random.randint(1, 4)):
        data[random.randrange(most)] = random.randrange(256)
    file.write_bytes(data)


# ---------------------------------------------------------------- GGUF
ENTRIES: tuple[tuple[int, Any], ...] = (
    *((4, 0), (4, 1), (4, 2), (4, 2**32 - 1), (5, -1), (10, 2**64 - 1), (11, -(2**63)), (10, BIG)),
    *((6, NAN), (6, INFINITY), (6, -1.0), (6, 0.0), (6, 0.5), (6, 1e38), (12, 1e-300), (7, True), (7, False)),
    *((STRING, ""), (STRING, "x"), (STRING, "a\nb"), (STRING, "\0"), (99, b"")),
    *((ARRAY, (4, [])), (ARRAY, (4, [1, 2])), (ARRAY, (STRING, ["a", "b"])), (ARRAY, (6, [NAN])), (ARRAY, (5, [-1]))),
    *((ARRAY, struct.pack("<IQ", 4, 2**63)), (ARRAY, struct.pack("<IQ", ARRAY, 1) * 5000), (ARRAY, (99, []))),
    *((STRING, struct.pack("<Q", 2**63)), (STRING, struct.pack("<Q", 2**64 - 1)), (ARRAY, struct.pack("<IQ", 99, 9))),
)


def gguf_cases(source: Path, random: Random) -> Iterator[Case]:
    raw = parse(source)
    yield from _gguf_file_cases(raw, random)
    for i, (key, kind, value) in enumerate(raw.metadata):
        yield _raw_case(raw, f"{key}: missing", lambda r, i=i: r.metadata.pop(i))
        yield _raw_case(raw, f"{key}: twice", lambda r, i=i: r.metadata.append(r.metadata[i]), "refused")
        near = [(kind, v) for v in (value + 1, value - 1) if v >= 0] if kind == 4 else []
        near += _near_arrays(value) if kind == ARRAY else []
        for entry in (*ENTRIES, *near):
            name = f"{key}: {entry[0]} {entry[1]!r:.60}"
            yield _raw_case(raw, name, lambda r, i=i, key=key, entry=entry: r.metadata.__setitem__(i, (key, *entry)))
    others = [i for i, tensor in enumerate(raw.tensors) if tensor.name.startswith("blk.") and ".0." not in tensor.name]
    for i in sorted({*range(len(raw.tensors))} - {*others} | {*random.sample(others, 4)}):
        yield from _gguf_tensor_cases(raw, i)
    for key, entry in NEW_ENTRIES:
        yield _raw_case(raw, f"{key}: {entry!r:.60}", lambda r, key=key, entry=entry: r.metadata.append((key, *entry)))


NEW_ENTRIES = tuple(
    (key, entry)
    for key, entries in {
        "general.alignment": ((4, 0), (4, 3), (5, -1), (4, 2**31), (STRING, "a"), (6, NAN), (4, 1), (7, True)),
        "split.count": ((4, 2), (STRING, "a"), (5, -1), (6, NAN), (ARRAY, (4, []))),
        "tokenizer.chat_template": ((4, 1), (STRING, "{{"), (ARRAY, (STRING, ["a"]))),
        **{
            f"llama.{key}": ENTRIES
            for key in ("rope.scaling.type", "rope.scaling.factor", "attention.scale", "attention.sliding_window")
        },
        **{f"tokenizer.ggml.{key}": ENTRIES for key in ("scores", "merges", "add_bos_token", "eot_token_id")},
    }.items()
    for entry in entries
)


def _near_arrays(value: tuple[int, list[Any]]) -> list[tuple[int, Any]]:
    of, elements = value
    changed = [elements[:-1], [*elements, elements[0]], elements[:1] * len(elements), elements[::-1], []]
    changed += [["\u00e9" * 5000, *elements[1:]], ["", *elements[1:]]] if of == STRING else []
    changed += [[BIG, *elements[1:]]] if of == 4 else []
    return [(ARRAY, (of, new)) for new in changed]


def _raw_case(raw: RawGGUF, name: str, change: Callable[[RawGGUF], Any], expected: Expected = "any") -> Case:
    def spoil(file: Path) -> None:
        spoilt = copy.deepcopy(raw)
        change(spoilt)
        file.write_bytes(spoilt.packed())

    return Case(f"gguf {name}", spoil, expected)


def _gguf_file_cases(raw: RawGGUF, random: Random) -> Iterator[Case]:
    data = raw.packed()
    fields: dict[str, tuple[Any, ...]] = {
        "magic": (b"GGML", b"\0\0\0\0", b"FUGG"),
        "version": (0, 1, 4, 2**24 * 3, 2**32 - 1),
        "tensor_count": (len(raw.tensors) + 1, 2**31, 2**63, 2**64 - 1, 0),
        "entries": (len(raw.metadata) + 1, len(raw.metadata) - 1, 2**31, 2**63, 2**64 - 1, 0),
    }
    for name, values in fields.items():
        for value in values:
            changed = dataclasses.replace(raw, **{name: value})
            yield Case(f"gguf {name} is {value!r}", partial(_write_file, changed.packed()), "refused")
    for end in (0, 3, 4, 8, 23, 24, len(data) - 1, *random.sample(range(len(data)), 12)):
        yield Case(f"gguf cut off at {end}", partial(_write_file, data[:end]), "refused")
    begins = len(data) - len(raw.data)
    for i in range(40):
        yield Case(f"gguf bytes {i}", partial(_flip, "", Random(random.random()), begins), finite=False)
    for key in ("general.architecture", "tokenizer.ggml.tokens"):
        place = raw.place_of(key)
        for length in (0, 1, len(key) + 1, 2**31, 2**63, 2**64 - 1):
            spoilt = data[:place] + struct.pack("<Q", length) + data[place + 8 :]
            yield Case(f"gguf {key} of {length} bytes", partial(_write_file, spoilt), "refused")


def _gguf_tensor_cases(raw: RawGGUF, i: int) -> Iterator[Case]:
    tensor, other = raw.tensors[i], raw.tensors[i - 1]
    dims = tensor.dims
    optional = tensor.name in ("output.weight", "rope_freqs.weight")  # the first: the embedding is lm_head, then
    name = tensor.name
    yield _raw_case(raw, f"{name}: missing", lambda r: r.tensors.pop(i), "any" if optional else "refused")
    yield _raw_case(raw, f"{name}: twice", lambda r: r.tensors.append(r.tensors[i]), "refused")
    shapes = [
        [],
        [0],
        [1],
        dims[:-1],
        [*dims, 2],
        [0, *dims[1:]],
        [dims[0] + 32, *dims[1:]],
        [*dims[:-1], dims[-1] + 1],
    ]
    shapes += [dims[::-1], [2**63, 2], [2**64 - 1], [2] * 9, [dims[0] // 2, *dims[1:]], [*dims[:-1], dims[-1] - 1]]
    for shape in shapes:
        if shape != dims:
            yield _raw_case(raw, f"{name}: shape {shape}", partial(_set_tensor, i, "dims", shape), "refused")
    for kind in (*range(40), 99, 2**32 - 1):
        if kind != tensor.type:
            yield _raw_case(raw, f"{name}: type {kind}", partial(_set_tensor, i, "type", kind))._replace(finite=False)
    for offset in (1, tensor.offset + 4, other.offset, len(raw.data), len(raw.data) + 32, 2**63, 2**64 - 32, 2**64 - 1):
        yield _raw_case(raw, f"{name}: offset {offset}", partial(_set_tensor, i, "offset", offset), "refused")


def _set_tensor(i: int, key: str, value: Any, raw: RawGGUF) -> None:
    setattr(raw.tensors[i], key, value)


def _write_file(data: bytes, file: Path) -> None:
    file.write_bytes(data)
