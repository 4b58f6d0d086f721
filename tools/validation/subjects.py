"""The models of a validation, as GGUF files, each with a text to predict; and texts to tokenize."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gguf import GGMLQuantizationType
from tokenizers import Tokenizer

from server.evaluation.documents import find_special_tokens, make_stories
from server.models.files.directory import EMBEDDED, locate
from tools.real_models import REAL_MODELS
from tools.validation.gguf_files import write_tiny

README = Path(__file__).parents[2] / "README.md"  # prose, tables, code and settings: the text of the real models


@dataclass(frozen=True)
class Sizes:
    """How much of a model is computed: `predicted` tokens at the end of each window, and greedy texts."""

    window: int  # tokens
    num_windows: int
    predicted: int
    texts: int
    max_tokens: int


@dataclass(frozen=True)
class Subject:
    """A model to validate, and its text."""

    name: str
    file: Path
    text: str
    sizes: Sizes

    @property
    def eos_ids(self) -> frozenset[int]:
        """The ids of the tokens that end a text."""
        config = json.loads((locate(str(self.file)) / "generation_config.json").read_text())
        return frozenset(config["eos_token_id"])


TINY_TYPES = {"tiny": GGMLQuantizationType.BF16, "tiny-q8_0": GGMLQuantizationType.Q8_0}
# The larger the model, the less of it is computed: each takes some minutes on two cores.
SIZES: Mapping[str, Sizes] = {
    "tiny": Sizes(1024, 4, 64, 16, 64),
    "tiny-q8_0": Sizes(1024, 4, 64, 16, 64),
    "smollm2": Sizes(256, 8, 32, 16, 32),
    "gemma3": Sizes(640, 2, 64, 8, 32),  # its layers with a window of 512 tokens have dropped some when it predicts
    "qwen-0.5b": Sizes(192, 4, 32, 8, 32),
    "qwen-1.5b": Sizes(128, 2, 32, 8, 24),
}
SUBJECTS: Sequence[str] = tuple(SIZES)

# Texts whose tokens are compared with llama.cpp's.
# They leave out what llama.cpp is known to read in another way than the models' own tokenizers: text that is not in
# Unicode's form NFC (Qwen normalizes it), "</s>" where it is a common token (Qwen), and U+2581 beside spaces (Gemma).
TRICKY_TEXTS: Sequence[str] = (
    "The year 2026 had 365 days; 1,234,567.89 – 100%… 0 00 000 0000 00000",
    "  leading and   inner\t\ttabs \n\n\n new lines \r\n  and trailing   ",
    *("", "\n", "\t", " ", "  ", 16 * " " + "a", "\n\n\n\nb", "\r\n\r\n"),
    "naïve café Ａ ﬁ ½ ² Ⅳ ٣٤٥ ४५",
    "漢字かな交じり文 한국어 ไทย العربية עברית हिन्दी",
    "👩‍👩‍👧‍👦 🇩🇪 👍🏽 \u200b\u200d\ufeff \u00a0x\u3000y\u2028z 𝔘𝔫𝔦 𐍈 \x00\x7f",
    "I'm you're WE'LL they'd it's 'S 'tis don’t",
    "def f(x):\n    return x**2  # comment\n\n\tif x!=0 and y<=1e-10: pass",
    "<b>bold</b>&amp; <h1>\n<table><tr> ======----____****",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "a<|im_end|>b <|endoftext|> c  <|fim_prefix|>\n\n x<|im_start",
    "<s> <bos><start_of_turn>user\nHi <end_of_turn>\n<start_of_turn>model\n<eos> <pad><unk>[INST]<unused1>",
)


def is_there(name: str) -> bool:
    """Return whether a model of SUBJECTS is embedded or has been fetched."""
    return name in TINY_TYPES or REAL_MODELS[name].path.exists()


def make_subject(name: str, scratch: Path, sizes: Sizes | None = None) -> Subject:
    """Return a model of SUBJECTS that is there; the embedded one is written to the folder `scratch`. Raises OSError."""
    sizes = sizes or SIZES[name]
    if name not in TINY_TYPES:
        return Subject(name, REAL_MODELS[name].path, README.read_text(), sizes)
    write_tiny(file := scratch / f"{name}.gguf", TINY_TYPES[name])
    return Subject(name, file, _make_stories(sizes), sizes)


def _make_stories(sizes: Sizes) -> str:
    """Return stories that the embedded model was not trained on, a window more than is predicted."""
    tokenizer = Tokenizer.from_file(str(EMBEDDED["tiny"] / "tokenizer.json"))
    marks = find_special_tokens(tokenizer, frozenset(), tokenizer.get_vocab_size())
    stories = make_stories(tokenizer, marks, sizes.window, sizes.num_windows + 1)
    return "\n".join(tokenizer.decode(each.ids) for each in stories)
