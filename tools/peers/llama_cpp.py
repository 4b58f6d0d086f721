"""Builds llama.cpp's programs from source, and converts models to GGUF. The workarounds are those of this version."""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path

import torch

from server.engine.info import compute_digest
from tools.peers.installer import Installer

LLAMA_CPP, LLAMA_CPP_VERSION = "llama-cpp-python", "0.3.36"  # its source package contains llama.cpp
INSTALLED_VERSION = f"{LLAMA_CPP_VERSION}, server and quantize"  # of a complete folder
PROGRAMS = ("llama-server", "llama-quantize")
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


def install_llama_cpp(installer: Installer) -> None:
    """Build llama.cpp's PROGRAMS, and install what its converter of models needs. Raises InstallError."""
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
    building = [cmake, "--build", build, "--target", *PROGRAMS, "-j", str(BUILD_JOBS)]
    installer.run("building, which takes about 20 minutes", building)


def find_cmake(installer: Installer) -> str:
    """Return the path of cmake, which is installed from PyPI if the machine has none. Raises InstallError."""
    if (found := shutil.which("cmake")) is not None:
        return found
    installer.pip("cmake", "install", "cmake")
    return str(installer.python.with_name("cmake"))


def find_program(folder: Path, name: str) -> Path:
    """Return the path of one of the PROGRAMS."""
    return folder / "build" / "bin" / name


def llama_cpp_source(folder: Path) -> Path:
    """Return the folder of llama.cpp's source within the package's."""
    return folder / "source" / "vendor" / "llama.cpp"


def convert_model(installer: Installer, model: Path, matrix_type: str, pre_tokenizer: str) -> Path:
    """Return the model as a GGUF file, which is written once for each state of its files. Raises InstallError, OSError.

    `matrix_type` is bf16, f16 or q8_0; `pre_tokenizer` is llama.cpp's name for how the tokenizer splits texts.
    """
    file = installer.folder / f"{model.name}-{compute_digest(matrix_type, model)}.{matrix_type}.gguf"
    if not file.exists():
        partial, script = file.with_suffix(".partial"), Path(__file__).with_name("convert_to_gguf.py")
        arguments = [str(llama_cpp_source(installer.folder)), str(model), str(partial), matrix_type, pre_tokenizer]
        installer.run(f"converting the model to {matrix_type}", [str(installer.python), str(script), *arguments])
        partial.rename(file)
    return file
