"""The counts of a small checkout are those that one makes by hand."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from tools.code_statistics import (
    Lengths,
    compute_statistics,
    count_replaced_attributes,
    count_seam_type_checks,
    main,
)

SOURCES = {
    "config/__init__.py": '"""Settings."""\n',
    "kernels/ops.py": "class Ops:\n    def rms_norm(self):\n        return 1\n",
    "kernels/bench.py": "def rms_norm():\n    pass\n",
    "server/__init__.py": "",
    "server/api/routes.py": "class Ops:\n    async def get(self):\n        a = 1\n        return a\n",
    "tools/other.py": "class Ops: ...\n\n\ndef main():\n    rms_norm()\n",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in SOURCES.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path


def test_a_small_checkout_is_counted(root: Path) -> None:
    found = compute_statistics(root)
    assert found.folders == {
        "config": (0, 1),
        "kernels": (2, 5),
        "server": (0, 0),
        "server/api": (1, 4),
        "tools": (1, 5),
    }
    assert found.tooling_share == 2 / 10, "kernels.bench, of what is installed"
    assert found.files_to_touch["operation"] == 1, "neither what measures nor what is not installed counts"
    assert found.classes_with_one_name == {"Ops": ["kernels.ops", "server.api.routes"]}
    assert found.functions == Lengths(2, 3, 3)


def test_type_checks_and_replaced_attributes_are_counted() -> None:
    tree = ast.parse(
        "def f(self, seat, ops):\n"
        "    assert isinstance(seat, PagedSeat)\n"
        "    isinstance(ops, str | CpuOps), isinstance(ops, (int, base.Decoder)), isinstance(seat, dict | list)\n"
        "    setattr(self, 'a', 1)\n"
        "    setattr(ops, 'linear', f)\n"
        "    own, read = vars(ops), vars(seat)\n"
        "    own = vars(ops)\n"
        "    own.update(a=1)\n"
        "    own['b'] = 2\n"
        "    del own['b']\n"
        "    print(own['a'], own.get('a'))\n"
    )
    assert count_seam_type_checks(tree) == 3
    assert count_replaced_attributes(tree) == 4


def test_this_checkout_is_printed_and_written_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    main([])
    assert "kernels/selfcheck" in capsys.readouterr().out
    main(["--json"])
    assert json.loads(capsys.readouterr().out)["folders"]["server/engine/ipc"][0] == 5
