"""kvmux's side of a validation against transformers in the place of llama.cpp, and the command."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cache_strategies.registry import list_kinds
from tools.bench.table.documents import replace_section
from tools.peers.installer import Installer, InstallError
from tools.validation import __main__ as command
from tools.validation import files
from tools.validation.files import FileValidation, ValidationOptions
from tools.validation.kvmux import EXACT_KINDS, INSTANCES, make_config
from tools.validation.llama_cpp import LlamaCpp, LlamaCppText
from tools.validation.predictions import Agreement, GreedyAgreement, GreedyText, Predictions
from tools.validation.report import EXACT_BOUND, ValidatedFile, ValidatedRow, ValidationReport, as_json, as_text
from tools.validation.subjects import make_subject

ROOT = Path(__file__).parents[3]


class Transformers:
    """The embedded model under transformers, with the methods of LlamaCpp."""

    def __init__(self, directory: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(directory)

    @torch.inference_mode()
    def predict(self, text: Path, window: int, num_windows: int, scratch: Path) -> LlamaCppText:
        ids = self.tokenizer(text.read_text()).input_ids[: window * num_windows]
        windows = [ids[i : i + window] for i in range(0, len(ids), window)]
        begun = torch.tensor([[ids[0], *each[1:]] for each in windows])
        log_probs = self.model(begun).logits[:, window // 2 : -1].double().log_softmax(-1)
        targets = torch.tensor(windows)[:, window // 2 + 1 :, None]
        found = Predictions.from_log_probs(
            log_probs.gather(-1, targets).flatten().tolist(),
            [frozenset({top}) for top in log_probs.argmax(-1).flatten().tolist()],
        )
        return LlamaCppText(windows, found)

    def continue_greedily(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, eos_ids: frozenset[int]
    ) -> list[GreedyText]:
        return [self._continue_one(prompt, max_tokens) for prompt in prompts]

    def _continue_one(self, prompt: Sequence[int], max_tokens: int) -> GreedyText:
        whole = self.model.generate(torch.tensor([prompt]), max_new_tokens=max_tokens, do_sample=False, pad_token_id=1)
        ids = whole[0, len(prompt) :].tolist()
        return GreedyText(ids[:-1] if ids[-1] == 1 else ids)


@pytest.mark.alone
def test_every_strategy_is_compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    subject = replace(make_subject("tiny", tmp_path, print), window=128, num_windows=2)
    reference = Transformers(subject.directory)
    monkeypatch.setattr(LlamaCpp, "predict", lambda self, *rest: reference.predict(*rest))
    monkeypatch.setattr(LlamaCpp, "continue_greedily", lambda self, *rest: reference.continue_greedily(*rest))
    monkeypatch.setattr(files, "CACHE_TYPES", ("f32",))
    monkeypatch.setattr(files, "DTYPES", ("float32",))
    said: list[str] = []
    checked = FileValidation(
        subject, subject.directory, "f16", tmp_path, ValidationOptions(3, 12, 1), said.append
    ).run()
    assert checked.equal_tokens == checked.tokens == 256
    assert not checked.failures
    first, *rows = checked.rows
    assert (first.program, first.agreement.max_difference, first.greedy) == ("llama.cpp", 0, None)
    assert {row.strategy for row in rows} >= {*EXACT_KINDS, *INSTANCES}
    assert all(row.agreement.positions == 2 * 63 for row in rows)
    for row in rows:
        if row.exact:
            assert row.agreement.max_difference < 1e-3, row
            assert row.agreement.same_top == 1
            assert row.greedy is not None
            assert row.greedy.num_clear_differences == 0
    lossy = {row.strategy: row.agreement.mean_difference for row in rows if not row.exact}
    # quest reads a part of the keys only while it decodes, and a prompt is computed exactly
    assert all(lossy[name] > 1e-4 for name in ("paged_int8", "sliding_window_quarter", "compressed_half")), lossy
    assert any("sliding_window_quarter" in each for each in said), "progress is shown"


def test_the_settings_have_every_kind(tmp_path: Path) -> None:
    text = make_config(512)
    kinds = {line.partition(" = ")[2].strip('"') for line in text.splitlines() if line.startswith('"kind"')}
    assert kinds >= set(list_kinds())
    assert '"window" = 128' in text


# -------------------------------------------------------------------- the report
def make_row(strategy: str, ratio: float, *, exact: bool = True) -> ValidatedRow:
    greedy = GreedyAgreement(2, 1, 100, 90, 0)
    return ValidatedRow("kvmux", "float32", strategy, exact, Agreement(10, 5 * ratio, ratio, 0.01, 0.2, 0.9), greedy)


def make_file(*rows: ValidatedRow, equal_tokens: int = 100) -> ValidatedFile:
    first = ValidatedRow("llama.cpp", "f32", "-", True, Agreement(10, 5, 1, 0, 0, 1), None)
    return ValidatedFile("tiny", "f16", 2, 50, 2, equal_tokens, 100, [first, *rows])


def test_only_exact_strategies_have_a_bound() -> None:
    assert not make_file(make_row("paged", 1 + EXACT_BOUND / 2), make_row("w", 1.5, exact=False)).failures
    (failure,) = make_file(make_row("paged", 1 - 2 * EXACT_BOUND)).failures
    assert failure == "tiny, f16: kvmux, float32, paged: perplexity -1.00%"
    assert make_file(make_row("paged", float("nan"))).failures
    (failure,) = make_file(equal_tokens=60).failures
    assert "the tokenizers differ after 60 of 100 tokens" in failure


def test_the_report_has_a_row_for_each_strategy() -> None:
    report = ValidationReport(
        datetime(2026, 1, 2).astimezone(), "1", "llama.cpp 2", [make_file(make_row("paged", 2.0))]
    )
    text = as_text(report)
    assert "| llama.cpp | f32 | - | 5.0000 | +0.000% | 0.0000, 0.0000 | 100.00% | - | - | - |" in text
    assert "| kvmux | float32 | `paged` | 10.0000 | +100.000% | 0.0100, 0.2000 | 90.00% | 1 of 2 | 90.0% | 0 |" in text
    assert "- not as expected: tiny, f16: kvmux, float32, paged: perplexity +100.00%" in text
    told = json.loads(json.dumps(as_json(report)))
    assert told["files"][0]["rows"][1]["agreement"]["perplexity_ratio"] == 2.0
    assert len(told["not_as_expected"]) == 1


# -------------------------------------------------------------------- the command
def test_the_command_writes_the_document(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = ValidationReport(
        datetime(2026, 1, 2).astimezone(), "1", "llama.cpp 2", [make_file(make_row("paged", 1.0))]
    )
    monkeypatch.setattr(command, "run", lambda options, show_status: report)
    document = tmp_path / command.DOCUMENT
    document.write_text(f"<!-- printed by {command.MARK} -->\n<!-- end of {command.MARK} -->")
    assert command.main(["--docs", str(tmp_path), "--json", str(tmp_path / "it.json")]) == 0
    assert capsys.readouterr().out.strip() in document.read_text()
    failed = replace(report, files=[make_file(make_row("paged", 2.0))])
    monkeypatch.setattr(command, "run", lambda options, show_status: failed)
    assert command.main([]) == command.FAILED


def test_a_missing_llama_cpp_has_its_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(self: Installer, *rest: object) -> None:
        raise InstallError("source failed: no such package")

    monkeypatch.setattr(Installer, "ensure", refuse)
    assert command.main([]) == command.USER_ERROR
    assert "make validate: source failed: no such package" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--texts", "0"], ["--only", "nothing"], ["--docs", ".", "--only", "tiny"]])
def test_wrong_arguments_are_reported(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main(arguments)
    assert "make validate: error" in capsys.readouterr().err


def test_the_committed_document_has_a_place_for_the_tables() -> None:
    document = (ROOT / "docs" / "laboratory" / command.DOCUMENT).read_text()
    assert "here they are" in replace_section(document, command.MARK, "here they are")
