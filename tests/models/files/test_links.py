"""Links in a model's directory lead into it, to the blobs of its entry in Hugging Face's cache, or are refused."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from config.errors import SettingsError
from config.settings import load_settings
from server.engine.build import build_engine
from server.models.errors import ModelError
from server.models.files.directory import EMBEDDED, locate, resolve_model_settings
from server.models.formats.gguf_directory import LINK
from server.text.tokenizer import Tokenizer
from tests.models.gguf_files import gguf_model, write_gguf

FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")
ELSEWHERE = r"is a link to {}, outside of the model's directory: put the file itself there, or give --allow-symlinks"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the embedded model."""
    shutil.copytree(EMBEDDED["tiny"], tmp_path / "model")
    return tmp_path / "model"


def refused(directory: Path, link: Path, target: Path) -> None:
    """Everything that reads a model's directory asks `locate` for it first."""
    words = f"{link} {ELSEWHERE.format(target)}"
    with pytest.raises(ModelError) as error:
        locate(str(directory))
    assert words in str(error.value)
    with pytest.raises(SettingsError) as error:
        build_engine(load_settings(None, {"model": str(directory)}))
    assert words in str(error.value)
    assert locate(str(directory), allow_symlinks=True) == directory
    settings = resolve_model_settings(load_settings(None, {"model": str(directory), "allow_symlinks": True}))
    assert Tokenizer.from_directory(Path(settings.model)).vocab_size > 0


def moved(file: Path, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    return Path(shutil.move(file, folder / file.name))


@pytest.mark.parametrize("name", FILES)
def test_a_link_out_of_the_directory_is_refused_whichever_file_it_is(name: str, model: Path, tmp_path: Path) -> None:
    target = moved(model / name, tmp_path / "elsewhere")
    (model / name).symlink_to(target)
    refused(model, model / name, target)


@pytest.mark.parametrize("name", ["chat_template.jinja", "special_tokens_map.json", "further.safetensors"])
def test_so_is_one_to_a_file_that_need_not_be_there(name: str, model: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("{}")
    (model / name).symlink_to("../secret")
    refused(model, model / name, tmp_path / "secret")


def test_so_are_templates_and_their_folder(model: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "tool_use.jinja").write_text("{{ messages }}")
    templates = model / "additional_chat_templates"
    templates.symlink_to(elsewhere, target_is_directory=True)
    refused(model, templates, elsewhere)
    templates.unlink()
    templates.mkdir()
    (templates / "tool_use.jinja").symlink_to(elsewhere / "tool_use.jinja")
    refused(model, templates / "tool_use.jinja", elsewhere / "tool_use.jinja")


def test_a_link_may_lead_to_another_place_in_the_directory(model: Path) -> None:
    target = moved(model / "model.safetensors", model / "weights")
    (model / "step").symlink_to(target)
    (model / "model.safetensors").symlink_to("step")
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tool_use.jinja").symlink_to("../chat.jinja")
    (model / "chat.jinja").write_text("{{ messages }}")
    assert locate(str(model)) == model


def test_a_chain_of_links_counts_by_its_end(model: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("{}")
    (model / "a").symlink_to("b")
    (model / "b").symlink_to("../secret")
    refused(model, model / "a", tmp_path / "secret")


def test_a_link_to_nothing_and_one_to_itself(model: Path, tmp_path: Path) -> None:
    (model / "chat_template.jinja").symlink_to("nothing")
    assert locate(str(model)) == model
    (model / "chat_template.jinja").unlink()
    (model / "chat_template.jinja").symlink_to(tmp_path / "nothing")
    with pytest.raises(ModelError, match="outside of the model's directory"):
        locate(str(model))
    (model / "chat_template.jinja").unlink()
    (model / "chat_template.jinja").symlink_to("chat_template.jinja")
    with pytest.raises(ModelError, match=r"chat_template\.jinja is a link that leads to itself"):
        locate(str(model))


def test_what_is_no_file_at_all_is_refused_rather_than_waited_for(model: Path) -> None:
    os.mkfifo(model / "pipe.safetensors")
    with pytest.raises(ModelError, match=r"pipe\.safetensors is neither a file nor a directory"):
        locate(str(model))


# -------------------------------------------------------------------- Hugging Face's cache
def in_cache(model: Path, entry: Path) -> Path:
    """The model as huggingface_hub keeps it: links to blobs."""
    snapshot = entry / "snapshots" / ("c0ffee" * 7)[:40]
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(model.iterdir())):
        moved(file, entry / "blobs").rename(entry / "blobs" / f"{number}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    return snapshot


def test_the_blobs_of_the_same_entry(model: Path, tmp_path: Path) -> None:
    hub = tmp_path / "hub"
    snapshot = in_cache(model, hub / "models--acme--tiny")
    assert locate(str(snapshot)) == snapshot
    (tmp_path / "disk").mkdir()
    moved_hub = hub.rename(tmp_path / "disk" / "hub")
    hub.symlink_to(moved_hub, target_is_directory=True)
    assert locate(str(snapshot)) == snapshot, "the user's cache may itself be a link"


def test_not_those_of_another_entry_and_not_refs(model: Path, tmp_path: Path) -> None:
    entry = tmp_path / "models--acme--tiny"
    snapshot = in_cache(model, entry)
    (tmp_path / "models--acme--other" / "blobs").mkdir(parents=True)
    other = tmp_path / "models--acme--other" / "blobs" / "0"
    (entry / "refs").mkdir()
    for target in (other, entry / "refs" / "main"):
        target.write_text("{}")
        link = snapshot / "chat_template.json"
        link.symlink_to(target)
        refused(snapshot, link, target)
        link.unlink()


def test_blobs_beside_a_directory_that_is_not_in_the_cache(model: Path, tmp_path: Path) -> None:
    snapshot = in_cache(model, tmp_path / "mine")
    refused(snapshot, snapshot / "README.md", tmp_path / "mine" / "blobs" / "0")


# -------------------------------------------------------------------- what the user has named
def test_the_directory_may_be_a_link(model: Path, tmp_path: Path) -> None:
    (tmp_path / "named").symlink_to(model, target_is_directory=True)
    (model / "chat_template.jinja").symlink_to(model / "README.md")
    assert locate(str(tmp_path / "named")) == tmp_path / "named"
    (model / "chat_template.jinja").unlink()
    (tmp_path / "secret").touch()
    (model / "chat_template.jinja").symlink_to("../secret")
    refused(tmp_path / "named", model / "chat_template.jinja", tmp_path / "secret")


def test_a_gguf_file_may_be_a_link_and_ours_leads_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = write_gguf(gguf_model("llama"), tmp_path / "blob.gguf")
    (tmp_path / "mine.gguf").symlink_to(file)
    directory = locate(str(tmp_path / "mine.gguf"))
    assert (directory / LINK).resolve() == file
    assert locate(str(directory)) == directory, "as the engine does once more"

    shutil.copytree(directory, tmp_path / "copied", symlinks=True)
    with pytest.raises(ModelError, match="outside of the model's directory"):
        locate(str(tmp_path / "copied"))
    (directory / "chat_template.jinja").symlink_to(file)
    with pytest.raises(ModelError, match="outside of the model's directory"):
        locate(str(directory))


# -------------------------------------------------------------------- names in files
@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/model.safetensors", "a/../../x.safetensors", ".."])
@pytest.mark.parametrize("index", ["model.safetensors.index.json", "pytorch_model.bin.index.json"])
def test_an_index_names_files_beside_it(name: str, index: str, model: Path) -> None:
    (model / index).write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": name}}))
    with pytest.raises(ModelError, match="only files beside the index are read"):
        locate(str(model))


@pytest.mark.parametrize("text", ["[]", "{", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', "[" * 100_000])
def test_an_index_of_something_else_does_not_hinder(text: str, model: Path) -> None:
    (model / "vectors.index.json").write_text(text)
    assert locate(str(model)) == model
