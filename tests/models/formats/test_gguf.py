"""A GGUF file is computed as the model it was made from, in every type of tensor; what cannot be read is refused."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from transformers import PreTrainedModel

from config.errors import SettingsError
from kernels.backends import REFERENCE
from kernels.ops import Ops
from kernels.reference.backend import ReferenceOps
from kernels.weights.block_formats import FORMATS, BlockTensor
from kernels.weights.stored import dequantize_weight
from server.models.base import Model
from server.models.config import load_config
from server.models.errors import ModelError
from server.models.files.directory import locate
from server.models.files.end_tokens import read_eos_ids
from server.models.formats.gguf_directory import find_gguf_file
from server.models.formats.gguf_file import read_header
from server.models.formats.gguf_weights import GGUFWeights
from server.models.load import load_model, read_model_info
from server.models.no_cache import NoCacheAttention
from server.models.weights import WeightsConfig
from server.text.tokenizer import Tokenizer
from tests.engine.engine_driver import Driver
from tests.kernels.backend_matrix import BACKENDS, SLOW
from tests.kernels.block_weights import draw_weight
from tests.models.gguf_fields import RawGGUF, parse
from tests.models.gguf_files import gguf_model, round_weights, write_gguf, write_to
from tests.models.rounded_weights import SHORT_TEXTS, RoundedInputs, relative_difference

FAMILIES = (
    "llama",
    "llama_tied_biased",
    "llama_wide_heads",
    "llama3",
    "llama_linear",
    "llama_yarn",
    "mistral",
    "mistral_sees_all",
    "phi3",
    "phi3_longrope",
    "qwen2",
    "qwen2_tied",
    "qwen3",
    "gemma2",
    "gemma3",
)
TYPES = (Type.F32, Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0)


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def served(file: Path, dtype: torch.dtype = torch.float32, *, as_stored: bool = False, ops: Ops | None = None) -> Model:
    return load_model(
        locate(str(file)),
        "auto",
        ops=ops or ReferenceOps(),
        dtype=torch.float32,
        weights=WeightsConfig(dtype, as_stored=as_stored),
        device=torch.device("cpu"),
        positions=512,
    )


@torch.inference_mode()
def logits(model: Model, ids: torch.Tensor) -> torch.Tensor:
    """ids [n] -> [n, V]."""
    attention = NoCacheAttention(model.layer_specs, len(ids), model.device)
    attention.logit_index = attention.positions
    return model.forward(ids, attention)


def assert_same_logits(ours: Model, theirs: PreTrainedModel) -> None:
    ids = torch.randint(2, 300, (70,))
    with torch.inference_mode():
        torch.testing.assert_close(logits(ours, ids), theirs(ids[None]).logits[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    theirs = gguf_model(name)
    assert_same_logits(served(write_gguf(theirs, tmp_path / "a.gguf")), theirs)


def test_every_fourth_layer_of_smollm3_has_no_rope(tmp_path: Path) -> None:
    theirs = gguf_model("smollm3", num_hidden_layers=4, no_rope_layers=[1, 1, 1, 0], layer_types=["full_attention"] * 4)
    assert_same_logits(served(write_gguf(theirs, tmp_path / "a.gguf")), theirs)


@pytest.mark.parametrize("named", [1, 2])
def test_a_model_in_several_parts_is_one(named: int, tmp_path: Path) -> None:
    """Whichever part is named, and also if the parts are links, as in the hub's cache."""
    theirs = gguf_model("llama")
    (tmp_path / "real").mkdir()
    write_gguf(theirs, tmp_path / "real" / "a.gguf", split_max_tensors=12)
    parts = sorted((tmp_path / "real").glob("a-*.gguf"))
    assert len(parts) > 2
    for i, part in enumerate(parts):
        part.rename(tmp_path / "real" / f"blob{i}")
        (tmp_path / part.name).symlink_to(tmp_path / "real" / f"blob{i}")
    directory = locate(str(tmp_path / parts[named - 1].name))
    assert directory.name == "a"
    assert locate(str(tmp_path / parts[-1].name)) == directory
    assert_same_logits(served(tmp_path / parts[named - 1].name), theirs)


def test_a_missing_or_cut_off_part_is_told(tmp_path: Path) -> None:
    write_gguf(gguf_model("llama"), tmp_path / "a.gguf", split_max_tensors=12)
    first, *_, last = sorted(tmp_path.glob("a-*.gguf"))
    content = last.read_bytes()
    last.unlink()
    with pytest.raises(ModelError, match=rf"cannot read .*{last.name}: No such file"):
        locate(str(first))
    last.write_bytes(content[:-100])
    with pytest.raises(SettingsError, match=rf"{last.name} is cut off before the end of tensor"):
        Driver(first)
    last.write_bytes(first.read_bytes())
    with pytest.raises(ModelError, match=rf"{last.name} and .*{first.name} both have a tensor"):
        locate(str(first))


@pytest.mark.parametrize("kind", TYPES[1:])
@pytest.mark.parametrize("name", ["llama", "phi3", "qwen3", "gemma3"])
def test_logits_equal_those_of_the_dequantized_model(name: str, kind: Type, tmp_path: Path) -> None:
    theirs = gguf_model(name)
    file = write_gguf(theirs, tmp_path / "a.gguf", kind)
    round_weights(theirs, kind)
    assert_same_logits(served(file), theirs)
    assert_same_logits(served(file, as_stored=True), theirs)


@pytest.mark.parametrize("kind", TYPES)
def test_greedy_text_equals_that_of_transformers(kind: Type, tmp_path: Path) -> None:
    theirs = gguf_model("llama3")
    file = write_gguf(theirs, tmp_path / "a.gguf", kind)
    round_weights(theirs, kind)
    tokenizer = Tokenizer.from_directory(locate(str(file)))
    prompt = tokenizer.backend.encode("Tea for two, and two for tea.").ids
    expected = theirs.generate(
        torch.tensor([prompt]), max_new_tokens=15, do_sample=False, pad_token_id=0, eos_token_id=None
    )
    driver = Driver(file, kernels="reference")  # which round no activations
    heard = driver.submit("a", prompt, max_tokens=15)
    driver.run()
    assert tokenizer.decode(heard.tokens) == tokenizer.decode(expected[0, len(prompt) :].tolist()) != ""


def test_weights_are_kept_in_the_dtype_asked_for(tmp_path: Path) -> None:
    theirs = gguf_model("qwen3")
    file = write_gguf(theirs, tmp_path / "a.gguf", Type.Q8_0)
    assert served(file, torch.bfloat16).weight_bytes == sum(p.numel() for p in theirs.parameters()) * 2
    assert read_model_info(locate(str(file)), "auto").dtype == "bfloat16"


@pytest.mark.parametrize("kind", [Type.Q8_0, Type.Q4_0])
@pytest.mark.parametrize("name", ["llama", "llama_tied_biased", "gemma3"])
def test_blocks_stay_those_of_the_file(name: str, kind: Type, tmp_path: Path) -> None:
    theirs = gguf_model(name)
    file = write_gguf(theirs, tmp_path / "a.gguf", kind)
    round_weights(theirs, kind)
    weights = GGUFWeights(file, torch.bfloat16, torch.device("cpu"), kept_formats=FORMATS)
    for stored, expected in theirs.named_parameters():
        if expected.dim() == 2:
            for got in (read(stored, expected.shape) for read in (weights.matrix, weights.embedding)):
                assert isinstance(got, BlockTensor)
                assert got.format.name == kind.name
                assert torch.equal(dequantize_weight(got), expected), stored
    model = served(file, as_stored=True, ops=RoundedInputs())
    assert next(iter(model.weight_formats)) == kind.name
    matrices = sum(p.numel() for p in theirs.parameters() if p.dim() == 2)
    others = sum(p.numel() for p in theirs.parameters()) - matrices
    block, size = gguf.GGML_QUANT_SIZES[kind]
    assert model.weight_bytes == matrices // block * size + 4 * others


@pytest.mark.parametrize("name", ["llama", "llama_tied_biased", "qwen3"])
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name not in SLOW | {REFERENCE}])
def test_every_backend_multiplies_with_what_the_file_has(
    backend: str, name: str, tmp_path: Path, rng: random.Random
) -> None:
    """But that some round activations. Every tensor of the file is in a type of its own, as quantizers mix them."""
    theirs = gguf_model(name, hidden_size=256, intermediate_size=512, head_dim=64)
    types = [*(Type[name] for name in FORMATS), Type.F16, Type.BF16, Type.F32]
    file = write_gguf(theirs, tmp_path / "a.gguf", lambda _: rng.choice(types), rng=rng)
    computed = (served(file, as_stored=True, ops=ops) for ops in (BACKENDS[backend](), ReferenceOps(), RoundedInputs()))
    got, *ways = (torch.cat([logits(model, ids) for ids in SHORT_TEXTS]) for model in computed)
    assert min(relative_difference(got, expected) for expected in ways) < 1e-5


@pytest.mark.parametrize("name", [name for name, format in FORMATS.items() if format.halves])
def test_scales_that_are_no_numbers_are_refused(name: str, tmp_path: Path, rng: random.Random) -> None:
    format = FORMATS[name]
    data = draw_weight(rng, format, 3, 2).blocks.numpy()
    place = format.nbytes + rng.choice(format.halves)  # of the second block
    data[2, place : place + 2] = 0xFF, 0x7F
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "qwen2")
    writer.add_tensor("output.weight", data, raw_dtype=Type[name])
    file = write_to(writer, tmp_path / "a.gguf")
    weights = GGUFWeights(file, torch.float32, torch.device("cpu"), kept_formats=FORMATS)
    with pytest.raises(ModelError, match=r"tensor 'output.weight' has scales that are NaN or infinite: fetch the file"):
        weights.matrix("lm_head.weight", (3, 2 * format.columns))


@pytest.mark.parametrize("kind", [Type.Q4_K, Type.Q5_K, Type.Q6_K, Type.IQ4_XS, Type.MXFP4])
def test_whatever_the_gguf_package_dequantizes_is_read(kind: Type, tmp_path: Path) -> None:
    block, size = gguf.GGML_QUANT_SIZES[kind]
    data = np.random.default_rng(0).integers(0, 60, (6, 256 // block * size), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "qwen2")
    writer.add_tensor("output.weight", data, raw_dtype=kind)
    weights = GGUFWeights(write_to(writer, tmp_path / "a.gguf"), torch.float32, torch.device("cpu"))
    expected = torch.from_numpy(gguf.quants.dequantize(data, kind))
    torch.testing.assert_close(weights.get("lm_head.weight", expected.shape), expected, rtol=0, atol=0, equal_nan=True)


def test_the_header_is_what_the_gguf_package_reads(tmp_path: Path) -> None:
    file = write_gguf(gguf_model("llama3"), tmp_path / "a.gguf", Type.Q4_0)
    ours, theirs = read_header(file), gguf.GGUFReader(file)
    fields = {name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert ours.metadata == fields
    assert {name: (t.shape, t.type, t.offset) for name, t in ours.tensors.items()} == {
        t.name: (tuple(t.shape.tolist()[::-1]), t.tensor_type, t.data_offset) for t in theirs.tensors
    }
    skipped = {name for name in fields if name.startswith("tokenizer.") and isinstance(fields[name], list)}
    assert "tokenizer.ggml.token_type" in skipped
    expected = fields | dict.fromkeys(skipped)
    assert read_header(file, vocabulary=False) == ours._replace(metadata=expected)


# ---------------------------------------------------------------- what is unpacked
def test_a_file_is_unpacked_once_until_it_changes(cache: Path, tmp_path: Path) -> None:
    file = write_gguf(gguf_model("llama"), tmp_path / "mine.gguf", tokenizer__chat_template="{{ messages }}")
    directory = locate(str(file))
    assert directory.is_relative_to(cache)
    assert directory.name == "mine"
    before = (directory / "config.json").stat().st_mtime_ns
    assert locate(str(file)) == directory
    assert (directory / "config.json").stat().st_mtime_ns == before
    words = json.loads((directory / "tokenizer_config.json").read_text())
    assert (words["chat_template"], words["bos_token"], words["eos_token"]) == ("{{ messages }}", "<s>", "</s>")
    assert [path.name for path in directory.parent.iterdir()] == ["mine"]
    write_gguf(gguf_model("qwen3"), file)
    assert load_config(locate(str(file))).architecture == "Qwen3ForCausalLM"


def test_all_tokens_that_end_a_turn_are_found(tmp_path: Path) -> None:
    tokens = ["<s>", "</s>", "<|im_end|>", "<end_of_turn>", "<other>", *(chr(i) for i in range(0x100, 0x100 + 295))]
    file = write_gguf(
        gguf_model("qwen2"),
        tmp_path / "a.gguf",
        tokenizer__ggml__tokens=tokens,
        tokenizer__ggml__token_type=[3, 3, 4, 1] + [3] * 296,
        tokenizer__ggml__eot_token_id=4,
    )
    assert read_eos_ids(locate(str(file)), 300) == {1, 2, 3, 4}


def test_models_of_another_scale(tmp_path: Path) -> None:
    """The largest Gemmas divide scores by the root of the width of a head, not of its keys, and no key says so."""
    theirs = gguf_model("gemma2")
    file = write_gguf(theirs, tmp_path / "a.gguf", gemma2__block_count=46)
    assert load_config(locate(str(file))).scale == pytest.approx((64 / 4) ** -0.5)
    file = write_gguf(theirs, tmp_path / "b.gguf", gemma2__attention__scale=0.5, gemma2__final_logit_softcapping=None)
    config = load_config(locate(str(file)))
    assert config.scale == pytest.approx(0.5)
    assert config.logit_softcap == 30.0


# ---------------------------------------------------------------- what is refused
@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general__architecture": "mamba"}, "architecture 'mamba'; GGUF files can be of llama, smollm3, qwen2, qwen3"),
        ({"llama__context_length": None}, r"llama\.context_length is missing"),
        ({"llama__attention__head_count_kv": [2, 1, 2]}, r"head_count_kv differs from layer to layer"),
        ({"llama__attention__value_length": 8}, "value vectors are not as long as key vectors"),
        ({"llama__expert_count": 8}, "has experts"),
        ({"llama__rope__scaling__type": "spiral"}, "RoPE scaling 'spiral' is not known"),
        ({"split__count": 3}, "one part of 3: keep the names of all parts as they were, such as NAME-00001-of-00003"),
        (
            {"tokenizer__ggml__pre": "unheard-of"},
            r"tokenizer\.ggml\.pre\) 'unheard-of' is not known: it should be one of gpt-2",
        ),
        ({"llama__attention__head_count": 0}, "head_count is 0, and should be a number from 1 to"),
        ({"llama__attention__layer_norm_rms_epsilon": "a"}, "rms_epsilon is 'a', and should be a finite number"),
        ({"llama__rope__dimension_count": 64}, "partial_rotary_factor is 4.0"),
        ({"tokenizer__ggml__eos_token_id": "x"}, r"eos_token_id should be the number of a token"),
        ({"tokenizer__ggml__model": "bert"}, "tokenizer is of kind 'bert'; gpt2"),
        ({"tokenizer__ggml__tokens": None}, "has no vocabulary"),
    ],
)
def test_what_cannot_be_served_is_refused(metadata: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = write_gguf(gguf_model("llama"), tmp_path / "a.gguf", **metadata)
    with pytest.raises(ModelError, match=message) as caught:
        locate(str(file))
    assert str(file) in str(caught.value)
    assert not list(tmp_path.glob("cache/**/*.json"))


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="No such file"):
        locate(str(tmp_path / "a.gguf"))
    (tmp_path / "b.gguf").write_bytes(b"PK\x03\x04 and so on")
    with pytest.raises(ModelError, match=r"b\.gguf is not a GGUF file"):
        locate(str(tmp_path / "b.gguf"))
    (tmp_path / "c.gguf").write_bytes(b"GGUF" + struct.pack("<I", 1))
    with pytest.raises(ModelError, match="GGUF of version 1"):
        locate(str(tmp_path / "c.gguf"))
    (tmp_path / "d.gguf").touch()
    with pytest.raises(ModelError, match="damaged or cut off"):
        locate(str(tmp_path / "d.gguf"))


@pytest.mark.parametrize("share", [0.01, 0.1, 0.3, 0.6, 0.9])
def test_a_file_cut_off_before_the_weights_is_refused(share: float, tmp_path: Path) -> None:
    file = write_gguf(gguf_model("llama"), tmp_path / "a.gguf")
    weights = min(tensor.offset for tensor in read_header(file).tensors.values())
    file.write_bytes(file.read_bytes()[: int(weights * share)])
    for vocabulary in (True, False):
        with pytest.raises(ModelError, match=r"a\.gguf is damaged or cut off: fetch it again"):
            read_header(file, vocabulary=vocabulary)


def test_a_file_cut_off_within_the_weights_is_refused(tmp_path: Path) -> None:
    file = write_gguf(gguf_model("llama"), tmp_path / "a.gguf")
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(SettingsError, match=r"a\.gguf is cut off before the end of tensor"):
        Driver(file)


def test_tensors_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    file = write_gguf(gguf_model("llama"), tmp_path / "a.gguf", Type.Q8_0)
    data = file.read_bytes()
    name = b"blk.0.ffn_up.weight"
    place = data.index(name) + len(name) + 4 + 2 * 8  # where the type stands, behind the shape
    for kind, called in ((15, "Q8_K"), (99, "99")):
        file.write_bytes(data[:place] + struct.pack("<I", kind) + data[place + 4 :])
        with pytest.raises(SettingsError, match=rf"'blk\.0\.ffn_up\.weight' is of type {called}, which cannot be read"):
            Driver(file)


def test_a_missing_tensor_and_another_implementation_are_refused(tmp_path: Path) -> None:
    file = write_gguf(gguf_model("llama"), tmp_path / "a.gguf", llama__block_count=4)
    with pytest.raises(SettingsError, match=r"has no tensor 'blk\.3\."):
        Driver(file)
    with pytest.raises(SettingsError, match="computed by the lean decoder only"):
        Driver(file, model_impl="transformers")
    assert find_gguf_file(tmp_path) is None


def test_a_cache_that_cannot_be_written_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = write_gguf(gguf_model("llama"), tmp_path / "a.gguf")
    (tmp_path / "taken").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "taken"))
    with pytest.raises(ModelError, match=r"cannot unpack .* set XDG_CACHE_HOME"):
        locate(str(file))


def _field(change: Callable[[RawGGUF], Any], file: Path) -> None:
    raw = parse(write_gguf(gguf_model("llama"), file))
    change(raw)
    file.write_bytes(raw.packed())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: raw.tensors.append(raw.tensors[3]), "occurs twice"),
        (lambda raw: raw.metadata.append(raw.metadata[3]), "occurs twice"),
        (lambda raw: setattr(raw.tensors[2], "offset", raw.tensors[2].offset + 4), "begin at a multiple of 32 bytes"),
        (lambda raw: setattr(raw.tensors[2], "offset", raw.tensors[3].offset), "overlap: fetch the file again"),
        (lambda raw: setattr(raw.tensors[2], "dims", [1] * 5), "a tensor has 5 dimensions"),
        (lambda raw: raw.metadata.append(("general.alignment", 4, 48)), "alignment is not a power of two"),
        (lambda raw: raw.metadata.append(("a", 9, struct.pack("<IQ", 9, 1) * 5000)), "an array of arrays"),
        (
            lambda raw: raw.metadata.append(("a", 9, struct.pack("<IQ", 4, 5_000_000) + bytes(4 * 5_000_000))),
            "its arrays have more than 4194304 elements",
        ),
    ],
)
def test_what_is_wrong_with_a_header_is_reported(
    change: Callable[[RawGGUF], Any], message: str, tmp_path: Path
) -> None:
    _field(change, tmp_path / "a.gguf")
    with pytest.raises(SettingsError, match=rf"a\.gguf.*{message}"):
        Driver(tmp_path / "a.gguf")


@pytest.mark.parametrize(("kind", "eos"), [(5, -1), (4, 2**32 - 1), (7, True), (6, 1.0)])
def test_an_end_that_is_no_token_is_ignored(kind: int, eos: Any, tmp_path: Path) -> None:
    """As broken fine-tunes have it, and requests for a least number of tokens stumbled over."""
    file = tmp_path / "a.gguf"
    key = "tokenizer.ggml.eos_token_id"
    _field(lambda raw: raw.metadata.__setitem__(slice(None), [*_without(raw, key), (key, kind, eos)]), file)
    driver = Driver(file)
    assert driver.core.model.info.eos_ids == {1}, "</s>, which is a control token"
    heard = driver.submit("a", [5, 6], max_tokens=4, min_tokens=2)
    driver.run()
    assert len(heard.tokens) == 4


def _without(raw: RawGGUF, key: str) -> list[tuple[str, int, Any]]:
    return [entry for entry in raw.metadata if entry[0] != key]
