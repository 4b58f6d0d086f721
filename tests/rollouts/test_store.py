"""Roll-outs go on where they were after a restart: orderly, after a crash, with other settings, with a damaged file."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import pytest

from tests.rollouts.rollout_driver import INSTANCES, RolloutDriver
from tests.rollouts.test_rollouts import ROLLOUT, advance_to


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "state" / "rollouts.json"


def start(rng: random.Random, file: Path, rollouts: dict[str, Any] | None = None, **settings: Any) -> RolloutDriver:
    """Start a server that finds the file; the one before must have stopped."""
    return RolloutDriver(rng, {"r": ROLLOUT} if rollouts is None else rollouts, file, **settings)


def stop(driver: RolloutDriver) -> None:
    """End a server as a crash does: nothing more is written, and the system releases its lock."""
    driver.rollouts._store.close()


def test_a_roll_out_goes_on_where_it_was(rng: random.Random, file: Path) -> None:
    before = start(rng, file)
    before.serve(100)
    before.wait(70)
    assert before.show()["stage"] == 1
    before.wait(30)
    before.serve(1)
    before.rollouts.close()
    after = start(rng, file)
    old, new = before.show(), after.show()
    changing = ("elapsed_seconds", "verdict", "guards", "baseline", "canary")
    assert {k: v for k, v in new.items() if k not in changing} == {k: v for k, v in old.items() if k not in changing}
    assert new["elapsed_seconds"] == pytest.approx(30, abs=3)
    users = [f"user {i}" for i in range(100)]
    assert [before.choose(user)[:2] for user in users] == [after.choose(user)[:2] for user in users]


def test_a_roll_back_outlives_a_crash(rng: random.Random, file: Path) -> None:
    before = start(rng, file)
    before.serve(200, kl=2.0, agreed=0.1)
    stop(before)
    after = start(rng, file)
    assert after.show()["state"] == "rolled_back"
    assert after.show()["reason"] == before.show()["reason"]


def test_a_roll_out_of_an_operator_outlives_a_restart(rng: random.Random, file: Path) -> None:
    before = start(rng, file, {})
    before.rollouts.start("mine", ROLLOUT, "key 1")
    before.rollouts.control("mine", "advance", "key 1")
    stop(before)
    assert start(rng, file, {}).show("mine")["stage"] == 1


def test_time_without_a_server_does_not_count(rng: random.Random, file: Path) -> None:
    before = start(rng, file)
    before.serve(200)
    before.wait(50)
    before.serve(5)
    stop(before)
    after = start(rng, file)
    after.clock.now += 5
    after.rollouts.update()
    assert after.show()["state"] == "shadow"
    after.wait(10)
    assert after.show()["stage"] == 1


def test_changed_settings_begin_anew(rng: random.Random, file: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = start(rng, file)
    advance_to(before, 2)
    stop(before)
    with caplog.at_level(logging.INFO):
        after = start(rng, file, {"r": ROLLOUT | {"hold": 10}})
    assert after.show()["state"] == "shadow"
    assert "the settings have changed" in caplog.text


def test_a_changed_instance_begins_anew(rng: random.Random, file: Path) -> None:
    before = start(rng, file)
    advance_to(before, 2)
    stop(before)
    small = INSTANCES["small"] | {"block_size": 64}
    after = start(rng, file, strategies=INSTANCES | {"small": small})
    assert after.show()["state"] == "shadow"
    assert "the settings of its instances have changed" in after.show()["reason"]


def test_a_missing_instance_aborts(rng: random.Random, file: Path) -> None:
    before = start(rng, file, {})
    before.rollouts.start("mine", ROLLOUT, "key 1")
    stop(before)
    after = start(rng, file, {}, strategies={})
    assert after.show("mine")["state"] == "aborted"
    assert "the settings have no instance 'small' any more" in after.show("mine")["reason"]
    assert after.choose()[:4] == ("paged", "default", None, None)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"version": 9, "rollouts": []}', b"\xff\xfe"])
def test_a_damaged_file_changes_no_answer(
    rng: random.Random, file: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    file.parent.mkdir()
    file.write_bytes(content)
    driver = start(rng, file)
    assert driver.show()["paused"]
    assert driver.show()["state"] == "shadow"
    assert "cannot be read" in caplog.text
    assert file.with_name("rollouts.json.damaged").read_bytes() == content
    driver.serve(200)
    driver.wait(1000)
    assert driver.show()["state"] == "shadow"
    stop(driver)
    assert start(rng, file).show()["paused"], "the new file is sound"


def test_every_prefix_of_the_file_is_found_to_be_damaged(rng: random.Random, file: Path) -> None:
    before = start(rng, file)
    before.serve(30)
    advance_to(before, 1)
    stop(before)
    content = file.read_bytes()
    for length in sorted(rng.sample(range(len(content)), 20)):
        file.write_bytes(content[:length])
        driver = start(rng, file)
        assert driver.show()["paused"]
        stop(driver)


def test_two_servers_do_not_overwrite_each_others_state(
    rng: random.Random, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = start(rng, file)
    advance_to(first, 2)
    second = start(rng, file)
    assert "another server keeps its roll-outs in" in caplog.text
    assert "another server uses the file" in second.show()["reason"]
    assert second.show()["paused"], "its state is not known: the candidate may have been rolled back"
    assert not file.with_name("rollouts.json.damaged").exists()
    second.rollouts.control("r", "abort", "key 1")
    stop(first)
    stop(second)
    assert start(rng, file).show()["stage"] == 2


def test_a_full_disk_stops_nothing(
    rng: random.Random, file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver = start(rng, file)

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("server.rollouts.store._replace", fail)
        advance_to(driver, 2)
    assert driver.show()["stage"] == 2
    assert caplog.text.count("No space left on device") == 1
    driver.rollouts.control("r", "pause", "key 1")
    stop(driver)
    assert start(rng, file).show()["paused"]


def test_what_a_full_disk_kept_back_is_written_later(
    rng: random.Random, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = start(rng, file)
    advance_to(driver, 2)

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("server.rollouts.store._replace", fail)
        driver.rollouts.roll_back_unusable(["small"])
        driver.wait(5)
    driver.wait(5)
    stop(driver)
    assert start(rng, file).show()["state"] == "rolled_back"


def test_only_what_hinders_a_roll_out_of_the_settings_is_aborted(rng: random.Random, file: Path) -> None:
    before = start(rng, file, {})
    before.rollouts.start("aaa", ROLLOUT | {"from": "contiguous"}, "key 1")
    before.rollouts.start("zzz", ROLLOUT, "key 1")
    stop(before)
    after = start(rng, file)  # whose settings have a roll-out from paged
    assert [after.show(name)["state"] for name in ("aaa", "zzz", "r")] == ["shadow", "aborted", "shadow"]


def test_another_model_begins_anew(rng: random.Random, file: Path) -> None:
    before = start(rng, file)
    advance_to(before, 4)
    stop(before)
    assert start(rng, file, dtype="float16").show()["state"] == "shadow"


def test_a_restart_does_not_log_a_new_beginning(
    rng: random.Random, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        stop(start(rng, file))
        assert caplog.text.count("none -> shadow: declared in the settings") == 1
        assert [each["to"] for each in start(rng, file).show()["history"]] == ["shadow"]
    assert caplog.text.count("none -> shadow: declared in the settings") == 1
