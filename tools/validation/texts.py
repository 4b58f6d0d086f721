"""Texts whose tokens are compared with llama.cpp's.

They leave out what llama.cpp is known to read in another way than the models' own tokenizers: text that is not in
Unicode's form NFC (Qwen normalizes it), "</s>" where it is a common token (Qwen), and U+2581 beside spaces (Gemma).
"""

from __future__ import annotations

from collections.abc import Sequence

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
