"""Models by their name on the hub: fetched from a small hub of our own, once, with the user's token and cache."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from gguf import GGMLQuantizationType as Type

from config.settings import load_settings
from server.models.errors import ModelError
from server.models.files.directory import locate, resolve_model_settings
from tests.models.gguf_files import gguf_model, write_gguf
from tests.models.random_models import save_random_model

COMMIT = "c0ffee" + "0" * 34
SECRET = "hf_a_secret"
UNWANTED = ("pytorch_model.bin", "original/consolidated.safetensors", "README.md", "consolidated.safetensors")


class Hub(ThreadingHTTPServer):
    """Answers as the hub does, for acme/tiny (anybody), acme/private and acme/gated (with the token)."""

    def __init__(self, files: Path) -> None:
        self.files = files
        self.asked: list[str] = []
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, *_: Any) -> None:
        pass

    def _answer(self, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.asked.append(f"{self.command} {path}")
        repo = "/".join(path.removeprefix("/api/models").strip("/").split("/")[:2])
        if repo not in ("acme/tiny", "acme/private", "acme/gated"):
            return self._refuse(404, "RepoNotFound")
        if repo != "acme/tiny" and self.headers.get("Authorization") != f"Bearer {SECRET}":
            return self._refuse(*((403, "GatedRepo") if repo == "acme/gated" else (401, "RepoNotFound")))
        rest = path.split(repo, 1)[1].strip("/")
        if rest.startswith("revision/") and rest not in ("revision/main", "revision/v1"):
            return self._refuse(404, "RevisionNotFound")
        if rest.startswith("revision/"):
            return self._json({"id": repo, "sha": COMMIT, "siblings": [{"rfilename": n} for n in self._names()]})
        if rest.startswith("tree/"):
            return self._json([self._entry(name) for name in self._names()])
        return self._file(rest.removeprefix(f"resolve/{COMMIT}/"), body)

    def _names(self) -> list[str]:
        return [p.relative_to(self.server.files).as_posix() for p in self.server.files.rglob("*") if p.is_file()]

    def _entry(self, name: str) -> dict[str, Any]:
        content = (self.server.files / name).read_bytes()
        return {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}

    def _file(self, name: str, body: bool) -> None:
        content = (self.server.files / name).read_bytes()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def _json(self, value: Any) -> None:
        content = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    files = tmp_path / "files"
    save_random_model("llama", files, shard_size="100KB")
    for name in UNWANTED:
        (files / name).parent.mkdir(exist_ok=True)
        (files / name).write_text("not needed")
    with Hub(files) as hub:
        thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield hub
        hub.shutdown()
        thread.join()


LOCATE = """
import json, sys
from config.errors import SettingsError
from server.models.files.directory import locate

for model, revision in json.loads(sys.argv[1]):
    try:
        print(json.dumps([0, str(locate(model, revision))]))
    except SettingsError as error:
        print(json.dumps([2, str(error)]))
"""


def _locate_all(
    home: Path, hub: str, models: list[tuple[str, str | None]], **environment: str
) -> list[tuple[int, str]]:
    """In a process of its own: huggingface_hub reads its environment when it is imported. Status, place or error."""
    known = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    told = {"HF_ENDPOINT": hub, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    command = [sys.executable, "-c", LOCATE, json.dumps(models)]
    done = subprocess.run(command, env=known | told | environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return [(status, text) for status, text in map(json.loads, done.stdout.strip().splitlines()[-len(models) :])]


def _locate(home: Path, hub: str, model: str, **environment: str) -> tuple[int, str]:
    (found,) = _locate_all(home, hub, [(model, None)], **environment)
    return found


def test_a_model_is_fetched_once_and_only_what_is_needed(hub: Hub, tmp_path: Path) -> None:
    status, first = _locate(tmp_path / "home", hub.url, "acme/tiny")
    assert status == 0, first
    names = {p.name for p in Path(first).iterdir()}
    assert {"config.json", "tokenizer.json", "model.safetensors.index.json"} <= names
    assert len(list(Path(first).glob("*.safetensors"))) > 1
    assert not names & {Path(name).name for name in UNWANTED}
    assert Path(first).is_relative_to(tmp_path / "home")
    fetched = len([line for line in hub.asked if "/resolve/" in line])
    assert _locate(tmp_path / "home", hub.url, "acme/tiny") == (0, first)
    assert len([line for line in hub.asked if "/resolve/" in line]) == fetched


def test_a_gguf_file_is_fetched_by_its_type_or_name(hub: Hub, tmp_path: Path) -> None:
    theirs, folder = gguf_model("llama"), hub.files / "gguf"
    folder.mkdir()
    write_gguf(theirs, hub.files / "tiny-Q8_0.gguf", Type.Q8_0)
    write_gguf(theirs, folder / "tiny-Q4_0.gguf", Type.Q4_0, split_max_tensors=12)
    (hub.files / "mmproj-tiny-Q8_0.gguf").write_text("of images")
    (hub.files / "tiny-UD-Q4_0_4_4.gguf").write_text("another type")
    models = [("acme/tiny:q8_0", None), ("acme/tiny:tiny-Q8_0.gguf", None), ("acme/tiny:Q4_0", None)]
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    found = _locate_all(tmp_path / "home", hub.url, models, **environment)
    assert [status for status, _ in found] == [0, 0, 0], found
    places = [Path(place) for _, place in found]
    assert places[0] == places[1]
    assert [place.name for place in places[1:]] == ["tiny-Q8_0", "tiny-Q4_0"]
    assert len(list(places[2].glob("model-*.gguf"))) > 2
    fetched = {line.rsplit("/", 1)[1] for line in hub.asked if line.startswith("GET") and "/resolve/" in line}
    assert fetched == {path.name for path in hub.files.rglob("tiny-Q*.gguf")} | {"tiny-UD-Q4_0_4_4.gguf"}
    assert _locate_all(tmp_path / "home", hub.url, models, HF_HUB_OFFLINE="1", **environment) == found


def test_a_gguf_file_that_is_not_there_or_not_the_only_one_is_told(hub: Hub, tmp_path: Path) -> None:
    for name in ("tiny-Q8_0.gguf", "other-Q8_0.gguf"):
        (hub.files / name).write_text("GGUF")
    models = [("acme/tiny:Q8_0", None), ("acme/tiny:Q2_K", None)]
    several, none = _locate_all(tmp_path / "home", hub.url, models)
    assert several == (
        2,
        "acme/tiny has several GGUF files of Q8_0: give the name of one, as acme/tiny:other-Q8_0.gguf, tiny-Q8_0.gguf",
    )
    assert none == (2, "acme/tiny has no GGUF file of Q2_K: look up its files on the hub, and give acme/tiny:TYPE")


def test_without_the_network_what_was_fetched_is_found(hub: Hub, tmp_path: Path) -> None:
    _, first = _locate(tmp_path / "home", hub.url, "acme/tiny")
    asked = len(hub.asked)
    assert _locate(tmp_path / "home", hub.url, "acme/tiny", HF_HUB_OFFLINE="1") == (0, first)
    assert len(hub.asked) == asked
    status, message = _locate(tmp_path / "elsewhere", hub.url, "acme/tiny", HF_HUB_OFFLINE="1")
    assert status == 2
    assert message.startswith("acme/tiny is not on this machine, and cannot be downloaded: ")


def test_the_users_token_opens_what_is_closed(hub: Hub, tmp_path: Path) -> None:
    models = [("acme/private", None), ("acme/gated", None)]
    for status, message in _locate_all(tmp_path / "home", hub.url, models):
        assert status == 2
        assert "HF_TOKEN" in message
    assert [status for status, _ in _locate_all(tmp_path / "home", hub.url, models, HF_TOKEN=SECRET)] == [0, 0]


def test_revisions(hub: Hub, tmp_path: Path) -> None:
    (known, _), unknown = _locate_all(tmp_path / "home", hub.url, [("acme/tiny", "v1"), ("acme/tiny", "v7")])
    assert known == 0
    assert unknown == (2, "acme/tiny has no revision 'v7': give a branch, a tag or a commit of it")


def test_what_is_nowhere_is_reported(hub: Hub, tmp_path: Path) -> None:
    assert (
        "no model 'acme/none', neither on this machine nor on the hub"
        in _locate(tmp_path / "home", hub.url, "acme/none")[1]
    )
    status, message = _locate(tmp_path / "home", "http://127.0.0.1:9", "acme/tiny")
    assert status == 2
    assert message.startswith("acme/tiny is not on this machine, and cannot be downloaded: ")


def test_what_is_on_this_machine_is_not_asked_for(tmp_path: Path) -> None:
    save_random_model("llama", tmp_path / "mine")
    assert locate(str(tmp_path / "mine")) == tmp_path / "mine"
    with pytest.raises(ModelError, match="revision 'v1' is only for models on the hub"):
        locate(str(tmp_path / "mine"), "v1")
    for name in ("nonesuch", "./b", "../b", "./a/b", "a/b/c", "/no/such", "~nobody-here/x", "x" * 5000):
        with pytest.raises(ModelError, match="no model at"):
            locate(name)
    with pytest.raises(ModelError, match=r"cannot read models/a\.gguf: No such file"):
        locate("models/a.gguf")


def test_names_clients_know(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    save_random_model("llama", tmp_path / "mine")
    settings = resolve_model_settings(load_settings(None, {"model": str(tmp_path / "mine")}))
    assert settings.model_names == ["mine"]
    snapshot = tmp_path / "hub/models--acme--tiny-2.5/snapshots" / ("a" * 40)
    save_random_model("llama", snapshot)
    (tmp_path / "link").symlink_to(snapshot)
    for path in (snapshot, tmp_path / "link"):
        assert resolve_model_settings(load_settings(None, {"model": str(path)})).model_names == ["acme/tiny-2.5"]
    file = write_gguf(gguf_model("llama"), tmp_path / "yours.gguf")
    assert resolve_model_settings(load_settings(None, {"model": str(file)})).model_names == ["yours"]
    assert resolve_model_settings(load_settings(None, {})).model_names == ["tiny"]
    assert resolve_model_settings(load_settings(None, {"model_name": "gpt-4, my-model"})).model_names == [
        "gpt-4",
        "my-model",
    ]
