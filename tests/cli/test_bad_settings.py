"""No value of a setting causes a traceback: it is accepted, or refused with one sentence.

Values are drawn anew in each run. All run in this process, up to the supervisor or through the building of an engine.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from cache_strategies import registry
from config.errors import SettingsError
from config.flags import flag_name
from config.settings import Settings, group_settings, load_settings
from config.sources import env_name
from server.cli import main as cli
from server.engine.build import build_engine
from server.engine.info import summarize_engine
from tests.cli.file_permissions import enforced_permissions
from tests.cli.startup_errors import SMALL_ENGINE, startup_error

pytestmark = pytest.mark.timeout(300)

HUGE = "9" * 5000
LONG = "x" * 100_000

WORDS = [  # as a flag or a variable says them
    *("", "0", "-1", "1.5", "1e999", "nan", "inf", "-inf", "1e30", str(10**30), HUGE, "0x10", "1_000", "\uff11\uff12"),
    *(
        "x",
        "true",
        "null",
        "None",
        "[]",
        "{}",
        LONG,
        "\x1b[31m",
        "a\nb",
        " ",
        "\t",
        "\udc80",
        "\u00e9",
        "%s",
        "${HOME}",
    ),
    *("~", "~nobody-here/x", "/", "/dev/null", "..", "a,b", ",", "a..b", "[::", "1.2.3.4.5", "10EiB", "1e999GiB"),
]
TOML = [
    *('""', "0", "-1", "1.5", "nan", "inf", "-inf", str(10**30), str(-(10**30)), "1e400", "true", "[]", "{}", "[[]]"),
    *(r'"a\u0000b"', r'"\u001b[31m"', r'"a\nb"', "1979-05-27", "07:32:00", f'"{LONG}"', "[{}]", '["a", "b"]', "[nan]"),
    *("{a = {b = {}}}", "[" * 90 + "]" * 90),
]


@pytest.fixture
def any_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "resolve_model_settings", lambda settings: settings)


# -------------------------------------------------------------------- settings
@pytest.mark.usefixtures("started", "any_model")
@pytest.mark.parametrize("name", Settings.model_fields)
def test_any_value_of_any_setting(
    name: str, rng: random.Random, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    field = Settings.model_fields[name]
    port = {} if name == "port" else {"KVMUX_PORT": "0"}
    monkeypatch.delenv("KVMUX_PORT")
    for variable, value in port.items():
        monkeypatch.setenv(variable, value)
    if field.annotation is not bool and any(name in names for names in group_settings().values()):
        for word in rng.sample(WORDS, 3):
            startup_error(capsys, f"{flag_name(name)}={word}")
    file = tmp_path / "kvmux.toml"
    for value in rng.sample(TOML, 3):
        file.write_text(f"{name} = {value}\n", encoding="utf-8")
        startup_error(capsys, "--config", str(file))
    for word in rng.sample(WORDS, 3):
        monkeypatch.setenv(env_name(name), word)
        startup_error(capsys)


def nested(count: int) -> str:
    return "[" * count + "]" * count


FILES: dict[str, bytes] = {
    "empty": b"",
    "binary": bytes(range(256)),
    "zeros": bytes(100),
    "no_toml": b'{"port": 0}',
    "not_closed": b'model = "',
    "digits": b"port = " + b"9" * 10_000,
    "deep": f"model = {nested(100_000)}".encode(),
    "deep_options": f"[strategies.x]\nkind = 'paged'\nblock_size = {nested(90)}".encode(),
    "dotted": b"strategies." + b"a." * 2000 + b"b = 1",
    "twice": b"port = 0\nport = 0",
    "instance_of_nothing": b"[strategies.x]",
    "strange_names": b'[strategies."\\n"]\nkind = "paged"\n[strategies.""]\nkind = "paged"',
    "kind_of_all_kinds": b"[strategies.x]\nkind = {a = 1}",
    "rule_beyond": b'[[rules]]\nuse = "paged"\nkv_usage_above = 1e300',
}
VARIABLES: list[tuple[str, str]] = [
    *(("KVMUX_STRATEGIES", text) for text in ("", "{", "NaN", "[]", '"x"', '{"x": 3}', nested(100_000), nested(900))),
    ("KVMUX_STRATEGIES", f'{{"x": {{"kind": "paged", "o": {nested(900)}}}}}'),
    ("KVMUX_STRATEGIES", '{"\\ud800": {"kind": "paged"}}'),
    ("KVMUX_STRATEGIES", '{"x": {"kind": "\\u0000"}}'),
    ("KVMUX_RULES", '[{"use": "paged", "min_priority": 1e999}]'),
    ("KVMUX_RULES", f'[{{"use": "paged", "min_prompt_tokens": {HUGE}}}]'),
    ("KVMUX_STRATEGIES__", "1"),
    ("KVMUX_STRATEGIES____X", "1"),
    ("KVMUX_STRATEGIES__X__KIND__Y", "1"),
    ("KVMUX_STRATEGIES__X__" + "A__" * 3000 + "B", "1"),
    ("KVMUX_\udc80", "1"),
    ("KVMUX_a\nb", "1"),
    ("KVMUX_" + "x" * 10_000, "1"),
    ("KVMUX_", "1"),
    ("KVMUX_CONFIG", "/"),
    ("KVMUX_CONFIG", "\udc80"),
    ("KVMUX_CONFIG", "x" * 5000),
    ("KVMUX_BOARD", "x" * 5000),
    ("KVMUX_BOARD", "\udc80"),
]


@pytest.mark.usefixtures("started", "any_model")
@pytest.mark.parametrize("name", FILES)
def test_any_settings_file(name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "kvmux.toml"
    file.write_bytes(FILES[name])
    assert (startup_error(capsys, "--config", str(file)) == "") is (name == "empty")
    file.chmod(0)
    with enforced_permissions():
        assert "Permission denied" in startup_error(capsys, "--config", str(file))


@pytest.mark.usefixtures("started", "any_model")
@pytest.mark.parametrize(("name", "value"), VARIABLES)
def test_any_variable(
    name: str, value: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    assert startup_error(capsys)


# -------------------------------------------------------------------- what only the engine can check
NUMBERS: list[Any] = [
    *(0, -1, 1, 3, 7, 10**6, 10**12, 2**31, 2**63, 10**30, 1.5, float("nan"), float("inf"), True),
    *("", "x", "1", "1e9", HUGE, None, [], {}, [[]]),
]
SIZES = ["0", "1", "3", "1023", "65536", str(10**6), str(2**31), str(2**63), str(10**30), "1e-300", "10EiB"]
SIZED = (
    *(
        "max_seq_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "kv_overcommit",
        "kv_memory_share",
        "max_queued_requests",
    ),
    *("max_choices", "max_body_bytes", "num_speculative_tokens"),
)


def built(**settings: Any) -> None:
    """Build an engine; a SettingsError is fine, too."""
    told = ""
    try:
        summarize_engine(build_engine(load_settings(None, SMALL_ENGINE | settings)))
    except SettingsError as error:
        told = str(error)
    assert "\n" not in told


@pytest.mark.parametrize("kind", registry.BUILTIN)
def test_any_value_of_any_option_of_a_strategy(kind: str, rng: random.Random) -> None:
    options = registry.load_kind(kind).options_type.model_fields
    for option in options:
        for value in rng.sample(NUMBERS, 5):
            built(strategies={"x": {"kind": kind, option: value}})
    for _ in range(5):
        drawn = {option: rng.choice([0, 1, 2, 5, 64, 10**9, 10**12]) for option in options}
        built(strategies={"x": {"kind": kind, **drawn}})


@pytest.mark.parametrize("name", SIZED)
def test_any_size(name: str, rng: random.Random) -> None:
    for value in rng.sample(SIZES, 4):
        built(**{name: value})


@pytest.mark.parametrize("size", ["0", "1", "-1", "1e999GiB", "10EiB", str(2**64), HUGE, "1e-9GiB", "nan", "inf"])
def test_any_amount_of_memory(size: str) -> None:
    with pytest.raises(SettingsError):
        build_engine(load_settings(None, SMALL_ENGINE | {"kv_memory": size}))
