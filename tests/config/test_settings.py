"""The sources of settings and their precedence, and errors that name the setting and its source."""

from __future__ import annotations

import codecs
import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from config.errors import SettingsError
from config.settings import Settings, load_settings

Env = dict[str, str]


def load_toml(tmp_path: Path, toml: str, **flags: Any) -> Settings:
    file = tmp_path / "kvmux.toml"
    file.write_text(toml, encoding="utf-8")
    return load_settings(file, flags)


def set_env(monkeypatch: pytest.MonkeyPatch, env: Env) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)


# ---------------------------------------------------------------- what is read
def test_defaults_have_an_instance_per_built_in_kind() -> None:
    settings = load_settings(None, {})
    assert {name: each.kind for name, each in settings.strategies.items()} == {
        "paged": "paged",
        "contiguous": "contiguous",
        "sliding_window": "sliding_window",
    }
    assert settings.default_strategy == "paged"


@pytest.mark.parametrize(
    ("env", "flags", "port"),
    [({}, {}, 1), ({"KVMUX_PORT": "2"}, {}, 2), ({"KVMUX_PORT": "2"}, {"port": "3"}, 3), ({"kvmux_port": "2"}, {}, 2)],
)
def test_flags_beat_environment_beats_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, env: Env, flags: dict[str, str], port: int
) -> None:
    set_env(monkeypatch, env)
    assert load_toml(tmp_path, "port = 1", **flags).port == port


def test_sources_merge_key_by_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_env(monkeypatch, {"KVMUX_STRATEGIES__RING__WINDOW": "512", "KVMUX_STRATEGIES__RING__SINKS": "4"})
    settings = load_toml(tmp_path, '[strategies.ring]\nkind = "sliding_window"\nwindow = 256\nlimit = "50%"')
    ring = settings.strategies["ring"]
    assert (ring.kind, ring.limit, ring.options) == ("sliding_window", "50%", {"window": 512, "sinks": 4})


def test_an_object_may_be_a_table_or_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kwargs = {"enable_thinking": False, "names": ["a"]}
    toml = 'default_chat_template_kwargs = {enable_thinking = false, names = ["a"]}'
    assert load_toml(tmp_path, toml).default_chat_template_kwargs == kwargs
    text = json.dumps(kwargs)
    assert load_settings(None, {"default_chat_template_kwargs": text}).default_chat_template_kwargs == kwargs
    set_env(monkeypatch, {"KVMUX_DEFAULT_CHAT_TEMPLATE_KWARGS": text})
    assert load_settings(None, {}).default_chat_template_kwargs == kwargs


def test_tables_may_be_json_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    set_env(
        monkeypatch,
        {"KVMUX_STRATEGIES": '{"ring": {"kind": "sliding_window"}}', "KVMUX_RULES": '[{"use": "ring"}]'},
    )
    settings = load_settings(None, {})
    assert settings.strategies["ring"].kind == "sliding_window"
    assert settings.rules[0].use == "ring"


def test_a_built_in_instance_keeps_its_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_env(monkeypatch, {"KVMUX_STRATEGIES__CONTIGUOUS__LIMIT": "512MiB"})
    settings = load_toml(tmp_path, '[strategies.paged]\nfloor = "10%"\n[strategies.sliding_window]\nkind = "other"')
    assert (settings.strategies["paged"].kind, settings.strategies["paged"].floor) == ("paged", "10%")
    assert settings.strategies["contiguous"].limit == "512MiB"
    assert settings.strategies["sliding_window"].kind == "other"


@pytest.mark.parametrize(
    ("share", "written"), [("0.125", "12.5%"), ("1", "100%"), ("1e-9", "0.0000001%"), ("65536", "65536")]
)
def test_a_share_of_the_memory_may_be_a_number(tmp_path: Path, share: str, written: str) -> None:
    assert load_toml(tmp_path, f"[strategies.paged]\nlimit = {share}").strategies["paged"].limit == written


def test_memory_may_be_a_bare_number(tmp_path: Path) -> None:
    assert load_toml(tmp_path, "kv_memory = 1048576").kv_memory == "1048576"


@pytest.mark.parametrize("url", ["http://c", "HTTPS://me:secret@c:4318/of/mine?key=x", "http://[::1]:4318"])
def test_where_spans_go(url: str) -> None:
    assert load_settings(None, {"otlp_traces_endpoint": url}).otlp_traces_endpoint == url


@pytest.mark.parametrize("setting", ["api_keys", "cors_origins"])
def test_lists_of_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    both = ["first-one", "second-one"]
    assert getattr(load_settings(None, {}), setting) is None
    assert getattr(load_toml(tmp_path, f"{setting} = {both}"), setting) == both
    assert getattr(load_settings(None, {setting: "first-one,second-one"}), setting) == both
    set_env(monkeypatch, {f"KVMUX_{setting.upper()}": " first-one, second-one"})
    assert getattr(load_settings(None, {}), setting) == both


def test_settings_travel_to_other_processes(tmp_path: Path) -> None:
    settings = load_toml(tmp_path, '[strategies.ring]\nkind = "sliding_window"\nwindow = 4\n[[rules]]\nuse = "ring"')
    copy = pickle.loads(pickle.dumps(settings))
    assert copy == settings
    assert copy.strategies["ring"].options == {"window": 4}


def test_a_file_is_utf8_whatever_the_locale(tmp_path: Path) -> None:
    assert load_toml(tmp_path, 'model = "modèles/é"').model == "modèles/é"


# ---------------------------------------------------------------- what is refused
@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("prot = 1", "prot (from {file}) is not a setting; did you mean port?"),
        ("max-seq-len = 9", "max-seq-len (from {file}) is not a setting; did you mean max_seq_len?"),
        ('[[rules]]\nuse = "paged"\nmin_prompt_token = 3', "rules.0.min_prompt_token (from {file}) is not a setting; "
         "did you mean min_prompt_tokens?"),
        ("port = 1.5", "port (from {file}): should be a whole number"),
        ("workers = 0", "workers (from {file}): should be 1 or more"),
        ("port = 70000", "port (from {file}): should be 65,535 or less"),
        ("model = 3", "model (from {file}): should be a text"),
        ('dtype = "fp8"', "dtype (from {file}): should be 'auto', 'float32', 'bfloat16' or 'float16'"),
        ("kv_memory_share = nan", "kv_memory_share (from {file}): "),
        ('kv_memory = "2 fish"', "kv_memory (from {file}): '2 fish' is not an amount of memory"),
        ("kv_memory = true", "kv_memory (from {file}): 'True' is not an amount of memory"),
        ("strategies = 3", "strategies (from {file}): should be a table"),
        ("[strategies]\npaged = 3", "strategies.paged (from {file}): should be a table"),
        ("rules = 3", "rules (from {file}): should be a list"),
        ('[rules]\nuse = "paged"', "rules (from {file}): should be a list"),
        ("rules = [3]", "rules.0 (from {file}): should be a table"),
        ("[[rules]]\nmin_priority = 1", "rules.0.use (from {file}) is required"),
        ("[strategies.mine]\nwindow = 3", "strategies.mine.kind (from {file}) is required"),
        ('[strategies."a b"]\nkind = "paged"', "'a b' is not a name"),
        ('default_strategy = "page"', "default_strategy: there is no instance 'page'; instances are contiguous"),
        ('[[rules]]\nuse = "ring"', "rules[0].use: there is no instance 'ring'; instances are contiguous"),
        ('[strategies.paged]\nfallback = "ring"', "strategies.paged.fallback: there is no instance 'ring'"),
        ('[strategies.paged]\nfallback = "paged"', "the fallbacks form a circle, paged -> paged"),
        ("[strategies.paged]\nfallback = 3", "strategies.paged.fallback (from {file})"),
        (
            '[strategies.paged]\nfallback = "contiguous"\n[strategies.contiguous]\nfallback = "paged"',
            "the fallbacks form a circle, paged -> contiguous -> paged; the last must have none",
        ),
        ('[strategies.paged]\nlimit = "110%"', "strategies.paged.limit (from {file}): '110%': a percentage has to"),
        ('[strategies.paged]\nfloor = "much"', "strategies.paged.floor (from {file}): 'much' is not a share"),
        ('[strategies.paged]\nfloor = "60%"\nlimit = "50%"', "strategies.paged (from {file}): floor 60% is more than"),
        ('[strategies.paged]\nfloor = "1GiB"\nlimit = "1MiB"', "strategies.paged (from {file}): floor 1GiB is more"),
        ("api_keys = []", "api_keys (from {file}): should be a word, or several with commas between; leave it out"),
        ("api_keys = 12345678", "api_keys (from {file}): should be a word, or several with commas between"),
        ('api_keys = ["fine", "with a space"]', "api_keys (from {file}): key 2 should be letters, digits and signs"),
        ('api_keys = ["ключ"]', "api_keys (from {file}): key 1 should be letters, digits and signs of ASCII"),
        ('api_keys = ["the-same-key"]\nadmin_token = "the-same-key"', "admin_token is one of api_keys"),
        ('api_keys = ["the-same-key"]\nmetrics_key = "the-same-key"', "metrics_key equals the admin_token or one"),
        ("port = 8001\nmetrics_port = 8001", "metrics_port and port are both 8001"),
        ("watchdog_timeout = 0.2", "watchdog_timeout"),
        *(
            (f'otlp_traces_endpoint = "{url}"', "otlp_traces_endpoint (from {file}): should be a URL like http://")
            for url in ("", "garbage", "127.0.0.1:4318", "grpc://c:4317", "http://", "http://:4318", "http://[::1",
                        "http://c:port", "http://c:99999", "http://c d")
        ),
        ("queue_timeout = 0", "queue_timeout (from {file}): should be above 0"),
        ("request_timeout = inf", "request_timeout (from {file}): should be 604,800 or less"),
        ("drain_seconds = nan", "drain_seconds (from {file}): "),
        ("num_speculative_tokens = 17", "num_speculative_tokens (from {file}): should be 16 or less"),
        ("num_speculative_tokens = 3\nmax_speculative_tokens = 2", "num_speculative_tokens 3 is more than max_specul"),
        *((f"default_chat_template_kwargs = '{text}'", "default_chat_template_kwargs (from {file}): should be an ob")
          for text in ("x", "[1]", "", "[" * 10_000)),
        ("port = ", "{file} is not TOML: "),
    ],
)  # fmt: skip
def test_mistakes_in_the_file(tmp_path: Path, toml: str, message: str) -> None:
    with pytest.raises(SettingsError) as error:
        load_toml(tmp_path, toml)
    assert message.format(file=tmp_path / "kvmux.toml") in str(error.value)


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"KVMUX_PROT": "1"}, "the environment sets KVMUX_PROT, which is not a setting; did you mean KVMUX_PORT?"),
        ({"kvmux_prot": "1"}, "the environment sets kvmux_prot, which is not a setting"),
        ({"KVMUX_STRATEGIE__A__KIND": "paged"}, "KVMUX_STRATEGIE__A__KIND, which is not a setting; did you mean"),
        ({"KVMUX_PORT": "x"}, "port (from the environment, KVMUX_PORT): should be a whole number"),
        ({"KVMUX_PORT": ""}, "port (from the environment, KVMUX_PORT): should be a whole number"),
        ({"KVMUX_PORT__X": "1"}, "KVMUX_PORT is not a table; set KVMUX_PORT itself"),
        ({"KVMUX_RULES__0__USE": "paged"}, "KVMUX_RULES is not a table; set KVMUX_RULES itself"),
        ({"KVMUX_API_KEYS": ""}, "api_keys (from the environment, KVMUX_API_KEYS): should be a word, or several"),
        ({"KVMUX_API_KEYS": "long-enough,"}, "api_keys (from the environment, KVMUX_API_KEYS): should be a word"),
        ({"KVMUX_RULES": "paged"}, "KVMUX_RULES is not JSON"),
        ({"KVMUX_DEFAULT_CHAT_TEMPLATE_KWARGS": "x"}, "KVMUX_DEFAULT_CHAT_TEMPLATE_KWARGS is not JSON"),
        ({"KVMUX_STRATEGIES": "{"}, "KVMUX_STRATEGIES is not JSON"),
        ({"KVMUX_STRATEGIES": "[]"}, "strategies (from the environment, KVMUX_STRATEGIES): should be a table"),
        (
            {"KVMUX_STRATEGIES__PAGED__LIMIT": "x"},
            "strategies.paged.limit (from the environment, KVMUX_STRATEGIES): 'x'",
        ),
        (
            {"KVMUX_STRATEGIES__MINE__WINDOW": "3"},
            "strategies.mine.kind (from the environment, KVMUX_STRATEGIES) is req",
        ),
        ({"KVMUX_DEFAULT_STRATEGY": "page"}, "default_strategy: there is no instance 'page'"),
    ],
)
def test_mistakes_in_the_environment(monkeypatch: pytest.MonkeyPatch, env: Env, message: str) -> None:
    set_env(monkeypatch, env)
    with pytest.raises(SettingsError) as error:
        load_settings(None, {})
    assert message in str(error.value)


def test_every_mistake_is_named_with_the_source_that_won(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_env(monkeypatch, {"KVMUX_PORT": "y", "KVMUX_WORKERS": "0"})
    with pytest.raises(SettingsError) as error:
        load_toml(tmp_path, 'port = "x"', port="z")
    assert "port (from --port)" in str(error.value)
    assert "workers (from the environment, KVMUX_WORKERS)" in str(error.value)


def test_of_an_argument_in_python_no_flag_is_named() -> None:
    with pytest.raises(SettingsError, match=r"^kv_memry is not a setting; did you mean kv_memory\?"):
        load_settings(None, {"kv_memry": 3}, are_flags=False)
    with pytest.raises(SettingsError, match=r"^port: should be"):
        load_settings(None, {"port": -1}, are_flags=False)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"cannot read the settings file .*: No such file"):
        load_settings(tmp_path / "missing.toml", {})
    with pytest.raises(SettingsError, match=r"cannot read the settings file .*: Is a directory"):
        load_settings(tmp_path, {})
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(SettingsError, match="is not UTF-8: save it as UTF-8"):
        load_settings(binary, {})
    for encoding in ("utf-16-le", "utf-16-be"):  # without a byte order mark
        binary.write_text("port = 1234", encoding=encoding)
        with pytest.raises(SettingsError, match="is not UTF-8: save it as UTF-8"):
            load_settings(binary, {})
    marked = tmp_path / "marked.toml"
    marked.write_bytes(codecs.BOM_UTF8 + b"port = 1234\r\n")
    assert load_settings(marked, {}).port == 1234
    marked.write_text("port = [")
    with pytest.raises(SettingsError, match="is not TOML"):
        load_settings(marked, {})


@pytest.mark.parametrize("limits", [1, None, {"min_priority": "soon"}, {"min_priorty": 1}])
def test_api_keys_are_never_shown(limits: Any) -> None:
    """Errors are logged."""
    with pytest.raises(SettingsError, match=r"key_limits\.\(key 2\)") as refused:
        load_settings(
            None, {"api_keys": ["first-key", "second-key"], "key_limits": {"first-key": {}, "second-key": limits}}
        )
    assert "second-key" not in str(refused.value)


@pytest.mark.parametrize(("keys", "short"), [(None, []), (["x"], [1]), (["long-enough", "7777777", "88888888"], [2])])
def test_short_api_keys_are_taken_and_known(keys: list[str] | None, short: list[int]) -> None:
    settings = load_settings(None, {} if keys is None else {"api_keys": ",".join(keys)})
    assert (settings.api_keys, settings.short_api_keys) == (keys, short)


def test_fallbacks_of_fallbacks_follow_in_order(tmp_path: Path) -> None:
    settings = load_toml(
        tmp_path, '[strategies.paged]\nfallback = "mine"\n[strategies.mine]\nkind = "quest"\nfallback = "contiguous"'
    )
    assert settings.fallbacks == {
        "paged": ("mine", "contiguous"),
        "mine": ("contiguous",),
        "contiguous": (),
        "sliding_window": (),
    }
    assert "fallback" not in settings.strategies["mine"].options
