"""Installs xgrammar, a library of masks by grammars, which needs torch."""

from __future__ import annotations

from tools.peers.installer import Installer

XGRAMMAR_VERSION, TORCH_VERSION = "0.2.8", "2.13.0"


def install_xgrammar(installer: Installer) -> None:
    """Install xgrammar and torch. Raises InstallError."""
    installer.pip("packages", "install", f"torch=={TORCH_VERSION}", f"xgrammar=={XGRAMMAR_VERSION}")
