"""Measures how much of the JSON Schema test suite is supported: `python -m tests.grammar.run_schema_suite`.

The suite is in the source package of `jsonschema`, which is downloaded unless `--suite` names its folder `json`. Each
schema is checked as the server checks it. If it is supported, each of its tests is a text that the compiled grammar
must accept if it is valid, and refuse if it is not. A refusal of a valid text costs a model some freedom; the
acceptance of an invalid one would be a wrong answer, and ends the run with exit code 1.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from server.grammar.constraint import constrain_to_schema
from server.grammar.json_schema import adapt_schema
from server.grammar.lark import write_lark
from server.grammar.schema_numbers import SchemaError
from server.text.errors import GrammarError
from tests.grammar.judge import GrammarJudge

VERSION = "4.26.0"  # of jsonschema
DRAFT = "draft2020-12"


def download(folder: Path) -> Path:
    """Return the suite's folder, from the source package of jsonschema."""
    command = [sys.executable, "-m", "pip", "download", f"jsonschema=={VERSION}", "--no-binary", "jsonschema"]
    subprocess.run([*command, "--no-deps", "--quiet", "--dest", str(folder)], check=True)
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    return next(folder.glob("jsonschema-*/json"))


class Suite:
    """Runs the tests of files, and counts results by file."""

    def __init__(self) -> None:
        self._judge = GrammarJudge()
        self.counts: dict[str, Counter[str]] = defaultdict(Counter)
        self.reasons: Counter[str] = Counter()
        self.wrong: list[str] = []

    def run(self, file: Path) -> None:
        """Run the tests of a file."""
        counts = self.counts[file.stem]
        for group in json.loads(file.read_text()):
            counts["schemas"] += 1
            counts["tests"] += len(group["tests"])
            try:
                constraint = constrain_to_schema(adapt_schema(group["schema"]), "", whitespace=None)
                lark = write_lark(constraint.kind, constraint.text)
                for test in group["tests"]:
                    self._run_test(file, group["description"], test, lark, counts)
            except (SchemaError, GrammarError) as error:
                self.reasons[str(error)[:90]] += 1
                counts["refused with reason"] += 1
            else:
                counts["supported"] += 1

    def _run_test(self, file: Path, what: str, test: Any, lark: str, counts: Counter[str]) -> None:
        data = json.dumps(test["data"], ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
        accepted = self._judge.accepts(lark, data)
        if accepted == test["valid"]:
            counts["right"] += 1
        elif accepted:
            counts["invalid but accepted"] += 1
            self.wrong.append(f"{file.stem}: {what}: {test['description']}: {data.decode()[:60]}")
        else:
            counts["valid but refused"] += 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--suite", type=Path, help="folder `json` of the source package of jsonschema")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = args.suite or download(Path(folder))
        suite = Suite()
        for file in sorted((root / "tests" / DRAFT).glob("*.json")):
            suite.run(file)
    columns = ("schemas", "supported", "tests", "right", "valid but refused", "invalid but accepted")
    print(f"{'keyword':22}" + "".join(f"{column:>22}" for column in columns))
    for name, counts in suite.counts.items():
        print(f"{name:22}" + "".join(f"{counts[column]:22}" for column in columns))
    total = sum(suite.counts.values(), Counter())
    print(f"{'all':22}" + "".join(f"{total[column]:22}" for column in columns))
    print("\nreasons of refusals:", *(f"{count:4} {reason}" for reason, count in suite.reasons.most_common()), sep="\n")
    print("\ninvalid but accepted:", *suite.wrong, sep="\n")
    return bool(suite.wrong)


if __name__ == "__main__":
    sys.exit(main())
