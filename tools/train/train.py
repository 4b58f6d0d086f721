"""Trains the embedded model on generated text for a number of minutes; a run can be stopped and resumed.

    python -m tools.train.train --out runs/tiny --minutes 30 --threads 1
    python -m tools.train.train --out runs/tiny --minutes 120 --resume

The folder --out gets the tokenizer, the last checkpoint and a log. --minutes is the total training time, including
earlier runs; the learning rate depends on the share of it that has passed. export.py writes the trained model.
"""

import argparse
import json
import math
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tools.train.batches import BatchSource
from tools.train.corpus.packing import EVALUATION_SEED, RECORDS, STORIES, Mix, PackedRows, pack
from tools.train.corpus.words import HELD_OUT_NAMES
from tools.train.induction_init import init_induction_heads
from tools.train.measure import compute_perplexity, compute_recall, group_by_distance
from tools.train.model import Llama, LlamaShape, weighted_loss
from tools.train.optim import Muon
from tools.train.progress import open_display
from tools.train.tokenizer import load_or_train

MUON_RATE, ADAM_RATE = 0.003, 0.001
WARMUP_STEPS, DECAY_SHARE, MIN_LR_SCALE = 60, 0.6, 0.02
SAVE_SECONDS, MEASURE_SECONDS = 60.0, 120.0


# All rows have the full context: with short rows first, long distances are unlearnt (docs/laboratory/log.md).
MIX = Mix(stories=0.5, records=0.5)


@dataclass
class TrainingProgress:
    """The training done so far."""

    seconds: float = 0.0
    steps: int = 0
    tokens: int = 0


def get_lr_scale(share: float, steps: int) -> float:
    """Return the factor of the learning rate: a linear warm-up, then constant, then a linear decay.

    `share` is the share of the training time that has passed.
    """
    return min(1.0, (steps + 1) / WARMUP_STEPS) * min(1.0, max(MIN_LR_SCALE, (1 - share) / DECAY_SHARE))


@dataclass(frozen=True)
class TrainSettings:
    out: Path
    minutes: float
    device: str
    threads: int
    seed: int
    step_tokens: int
    workers: int
    compile: bool


class Trainer:
    def __init__(self, settings: TrainSettings, shape: LlamaShape) -> None:
        torch.manual_seed(settings.seed)
        self.settings, self.progress = settings, TrainingProgress()
        self.tokenizer_path = settings.out / "tokenizer.json"
        self.tokenizer = load_or_train(self.tokenizer_path, settings.seed)
        self.model = Llama(shape)
        init_induction_heads(self.model)
        self.model.to(settings.device)
        matrices = [p for p in self.model.layers.parameters() if p.ndim == 2]
        others = [self.model.embed_tokens.weight, *(p for p in self.model.parameters() if p.ndim == 1)]
        self.optimizers = (
            Muon(matrices, MUON_RATE),
            torch.optim.AdamW(others, ADAM_RATE, betas=(0.9, 0.98), weight_decay=0.0),
        )
        self._compute_loss = torch.compile(self._forward) if settings.compile else self._forward

    # ---- one step

    def _forward(self, ids: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        # bfloat16 is faster on a GPU, but not on a CPU without instructions for it.
        with torch.autocast(self.settings.device, torch.bfloat16, enabled=self.settings.device == "cuda"):
            return weighted_loss(self.model(ids), targets, weights)

    def step(self, batch: PackedRows, share: float) -> float:
        rate = get_lr_scale(share, self.progress.steps)
        for optimizer, full in zip(self.optimizers, (MUON_RATE, ADAM_RATE), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = full * rate
        ids = torch.from_numpy(batch.ids.astype("int64")).to(self.settings.device)
        weights = torch.from_numpy(batch.weights).to(self.settings.device)
        loss = self._compute_loss(ids[:, :-1], ids[:, 1:], weights[:, 1:])
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.progress.steps += 1
        self.progress.tokens += ids[:, 1:].numel()
        return float(loss.item())

    # ---- the whole run

    def run(self) -> None:
        settings, progress = self.settings, self.progress
        total, context = settings.minutes * 60, self.model.shape.positions
        source = BatchSource(self.tokenizer_path, settings.seed, progress.steps, settings.workers)
        saved = measured = progress.seconds
        loss = math.nan
        with source, open_display(total) as display:
            while progress.seconds < total:
                began, share = time.monotonic(), progress.seconds / total
                batch = source.next(context, settings.step_tokens // context, MIX)
                loss = self.step(batch, share)
                progress.seconds += time.monotonic() - began
                display.step(progress.seconds, f"{progress.tokens / 1e6:.2f}M tokens", loss)
                if progress.seconds - saved > SAVE_SECONDS:
                    saved = progress.seconds
                    self.save()
                if progress.seconds - measured > MEASURE_SECONDS:
                    measured = progress.seconds
                    display.note(self.evaluate(loss))
            display.note(self.evaluate(loss))
        self.save()

    def evaluate(self, loss: float) -> str:
        """Evaluate the model on a few held-out documents, always the same; log the result and return it as text."""
        context = self.model.shape.positions
        results = compute_recall(self.model, pack(self.tokenizer, EVALUATION_SEED, context, 4, RECORDS, HELD_OUT_NAMES))
        perplexity = compute_perplexity(self.model, pack(self.tokenizer, EVALUATION_SEED, 512, 8, STORIES))
        recall = {upto: f"{right}/{asked}" for upto, (right, asked) in group_by_distance(results).items()}
        entry = {
            **asdict(self.progress),
            "loss": loss,
            "story_perplexity": perplexity,
            "recall_of_held_out_names": recall,
        }
        with (self.settings.out / "log.jsonl").open("a") as log:
            log.write(json.dumps(entry) + "\n")
        return f"perplexity of stories {perplexity:.3f}, recall of held-out names by distance {recall}"

    # ---- checkpoints

    @property
    def _checkpoint(self) -> Path:
        return self.settings.out / "checkpoint.pt"

    def save(self) -> None:
        """Save a checkpoint atomically: if the process is killed meanwhile, the old checkpoint remains."""
        state = {
            "shape": asdict(self.model.shape),
            "done": asdict(self.progress),
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }
        partial = self._checkpoint.with_suffix(".partial")
        torch.save(state, partial)
        os.replace(partial, self._checkpoint)

    def resume(self) -> None:
        state: dict[str, Any] = torch.load(self._checkpoint, map_location=self.settings.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.progress = TrainingProgress(**state["done"])


def parse_settings() -> tuple[TrainSettings, bool]:
    parser = argparse.ArgumentParser(description="Train the embedded model.")
    parser.add_argument("--out", type=Path, required=True, help="folder for tokenizer, checkpoint and log")
    parser.add_argument("--minutes", type=float, required=True, help="total training time, including earlier runs")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default 1)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--step-tokens", type=int, help="tokens of a step (default 8192, on a GPU 32768)")
    parser.add_argument("--workers", type=int, help="processes that make text (default 0, on a GPU all cores but one)")
    parser.add_argument("--compile", action="store_true", help="faster steps; the first ones take a minute")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint in --out")
    a = parser.parse_args()
    device = a.device if a.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    on_gpu = device == "cuda"
    step_tokens = a.step_tokens or (32768 if on_gpu else 8192)
    if step_tokens < LlamaShape().positions:
        parser.error(f"--step-tokens should be at least {LlamaShape().positions}, the tokens of one row")
    workers = a.workers if a.workers is not None else max(1, (os.cpu_count() or 2) - 1) if on_gpu else 0
    return TrainSettings(a.out, a.minutes, device, a.threads, a.seed, step_tokens, workers, a.compile), a.resume


def main() -> None:
    settings, resume = parse_settings()
    checkpoint = settings.out / "checkpoint.pt"
    if resume and not checkpoint.exists():
        raise SystemExit(f"There is no checkpoint in {settings.out}: start without --resume, or name another --out.")
    if checkpoint.exists() and not resume:
        raise SystemExit(f"{settings.out} has a checkpoint: add --resume to continue it, or give another --out.")
    settings.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(settings.threads)
    torch.set_flush_denormal(True)  # sharp attention produces denormals, which are slow on a CPU
    trainer = Trainer(settings, LlamaShape())
    if resume:
        trainer.resume()
    trainer.run()


if __name__ == "__main__":
    main()
