"""Converts the tokenizer in a GGUF file's metadata to the contents of tokenizer.json and tokenizer_config.json.

llama.cpp stores a vocabulary and the name of a pre-tokenizer; PRE_TOKENIZERS maps names to regular expressions. An
unknown name is an error: text split in another way gets other ids, and the model would become worse without a sign.
Reads no files.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Set
from functools import cached_property
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from config.errors import SettingsError

log = logging.getLogger(__name__)

DEFAULT = "default"  # the name of llama.cpp's own pre-tokenizer, which is taken if a file names none
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # GGUF's types of tokens; 5 is unused, 6 is a byte
MAX_TOKEN_LENGTH = 2048  # most characters of a token; the work for one is proportional to its length squared
SPACE = "\u2581"  # SentencePiece's
PREFIX = "tokenizer.ggml."
# Tokens that end a text or a turn, whatever the file calls them, as in llama.cpp. Those of TAGS may be common text.
# Some begin another file, after one whose middle a model has filled in.
MARKS = frozenset(
    {
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<end_of_turn>",
        "<turn|>",
    }
    | {"<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<|tool_response>", "<end_of_utterance>", "[e~["}
    | {"<\uff5cend\u2581of\u2581sentence\uff5c>"}
    | {"<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<|fim_repo|>", "<fim-repo>", "<|repo_name|>", "<|file_sep|>"}
)
TAGS = frozenset(["</s>", "<eos>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<PAD>", "[PAD]", "<REPO>", "<reponame>"])
END_ROLES = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")  # of the tokens that a file names as ends
SENTENCE_PIECE_IDS = {"unknown": 0, "bos": 1, "eos": 2}  # those of files that do not say


class PreTokenizer(NamedTuple):
    """How a pre-tokenizer splits text before byte pairs are merged."""

    regex: str | None = None  # None: GPT-2's, unless there are `splits`
    splits: tuple[str, ...] = ()  # expressions, each of which splits the pieces that those before it have left
    digits: bool = False  # whether each digit is a piece of its own
    ignore_merges: bool = False  # whether a piece that is in the vocabulary becomes one token without merges
    nfc: bool = False  # whether Unicode is normalized to NFC
    bos: bool = False  # whether a text begins with the BOS token, if add_bos_token is not in the file


_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+{end}"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*{end}"
)
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LINES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_PUNCTUATION = r"| ?[^\s\p{L}\p{N}]+[\r\n]*" + _LINES
_PATHS = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _LINES
_LLAMA3 = PreTokenizer(_CONTRACTIONS + "|" + _WORDS + r"|\p{N}{1,3}" + _PUNCTUATION, ignore_merges=True, bos=True)
_CL100K = _LLAMA3._replace(ignore_merges=False, bos=False)
_QWEN2 = PreTokenizer(_CONTRACTIONS + "|" + _WORDS + r"|\p{N}" + _PUNCTUATION)
_TEKKEN = PreTokenizer(_CASED.replace("{end}", "") + r"|\p{N}" + _PATHS, ignore_merges=True, bos=True)
_GPT4O = PreTokenizer(_CASED.replace("{end}", _CONTRACTIONS + "?") + r"|\p{N}{1,3}" + _PATHS)
_GPT2, _DIGITS = PreTokenizer(), PreTokenizer(digits=True)
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_LLM = PreTokenizer(
    splits=(
        r"[\r\n]",
        r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
        r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
        _CJK,
        r"\p{N}+",
    )
)
_DEEPSEEK_CODER = PreTokenizer(splits=(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}"))
_DEEPSEEK3 = PreTokenizer(
    splits=(
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    )
)
_DEFAULT = PreTokenizer(
    splits=(
        r"[\p{P}\$\+<=>\^~\|]+",
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
        r"\p{N}+",
        r"[0-9][0-9][0-9]",
    )
)

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {  # by tokenizer.ggml.pre
    **dict.fromkeys(("gpt-2", "mpt", "olmo", "jais", "phi-2", "exaone4"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _CL100K),
    **dict.fromkeys(("deepseek-r1-qwen", "megrez"), _QWEN2),
    "qwen2": _QWEN2._replace(nfc=True),
    "tekken": _TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
    "deepseek-llm": _DEEPSEEK_LLM,
    "deepseek-coder": _DEEPSEEK_CODER,
    "deepseek-v3": _DEEPSEEK3,
    "default": _DEFAULT,
}


def make_tokenizer(metadata: Mapping[str, Any]) -> tuple[Tokenizer, dict[str, Any]]:
    """Return the tokenizer that a GGUF file's metadata describes, and its tokenizer_config.json.

    Raises SettingsError for a tokenizer that cannot be converted.
    """
    vocabulary = _Vocabulary(metadata)
    kind = vocabulary.get("model")
    if kind == "gpt2":
        pre_tokenizer = _find_pre_tokenizer(vocabulary)
        tokenizer, bos = _make_byte_level(vocabulary, pre_tokenizer), pre_tokenizer.bos
    elif kind == "llama":
        tokenizer, bos = _make_sentence_piece(vocabulary), True
    else:
        raise SettingsError(
            f"the tokenizer is of kind {kind!r}; gpt2 (byte pairs) and llama (SentencePiece) can be read"
        )
    _add_tokens(tokenizer, vocabulary)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": bool(vocabulary.get("add_bos_token", bos)),
        "add_eos_token": bool(vocabulary.get("add_eos_token", False)),
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if (token := vocabulary.get_special_token(key)) is not None:
            config[f"{name}_token"] = token
    if (end := config.get("eos_token")) is not None:  # with its id, so that nobody has to search the vocabulary for it
        config["added_tokens_decoder"] = {str(vocabulary.get_token_id("eos")): {"content": end, "special": True}}
    if (template := metadata.get("tokenizer.chat_template")) is not None:
        if not isinstance(template, str):
            raise SettingsError("tokenizer.chat_template should be a string")
        config["chat_template"] = template
    _set_post_processor(tokenizer, config)
    return tokenizer, config


def find_end_tokens(metadata: Mapping[str, Any]) -> list[Any]:
    """Return the ids of tokens that end a text or a turn.

    These are the values of eos_token_id and of the other END_ROLES in the file, even if they are not valid ids (-1),
    and the tokens that end texts by their names.
    """
    vocabulary = _Vocabulary(metadata)
    named = [id for role in END_ROLES if (id := vocabulary.get_token_id(role)) is not None]
    return [*named, *sorted(vocabulary.ends - {id for id in named if type(id) is int})]


class _Vocabulary:
    """A GGUF file's tokens with their types and scores. Raises SettingsError for lists of a wrong type or length."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata
        tokens = self._get_list("tokens", str)
        self.tokens: list[str] = [_escape_spaces(token) for token in tokens] if self.get("model") == "llama" else tokens
        self.ids = {token: i for i, token in enumerate(self.tokens)}
        if not self.tokens:
            raise SettingsError(f"the tokenizer has no vocabulary ({PREFIX}tokens)")
        if (longest := max(map(len, self.tokens))) > MAX_TOKEN_LENGTH:
            raise SettingsError(
                f"the tokenizer's longest token has {longest} characters; at most {MAX_TOKEN_LENGTH} can be read"
            )
        self.types: list[int] = self._get_list("token_type", int) or [NORMAL] * len(self.tokens)
        self.scores: list[float] = self._get_list("scores", float) or [0.0] * len(self.tokens)
        if not len(self.tokens) == len(self.types) == len(self.scores):
            raise SettingsError(
                f"the tokenizer has {len(self.tokens)} tokens, {len(self.types)} types and {len(self.scores)} scores"
            )

    def get(self, key: str, default: Any = None) -> Any:
        return self._metadata.get(PREFIX + key, default)

    def _get_list(self, key: str, kind: type) -> list[Any]:
        """Return a list of the metadata, empty if absent. Raises SettingsError for values not of type `kind`."""
        values = self.get(key) or []
        if not isinstance(values, list) or not all(type(value) is kind for value in values):
            raise SettingsError(f"{PREFIX}{key} should be a list of values of type {kind.__name__}")
        return values

    def get_token_id(self, key: str) -> Any:
        """Return what the file has as the id of the token with a role such as "bos"; None if it names none.

        SentencePiece's own id stands for one that is missing or beyond the vocabulary.
        """
        id = self.get(f"{key}_token_id")
        default = SENTENCE_PIECE_IDS.get(key) if self.get("model") == "llama" else None
        is_beyond = type(id) is int and not 0 <= id < len(self.tokens)
        return default if default is not None and (id is None or is_beyond) else id

    @cached_property
    def ends(self) -> Set[int]:
        """The tokens that end a text or a turn by their names."""
        kinds = zip(self.tokens, self.types, strict=True)
        names = {token for token, kind in kinds if token in MARKS or (token in TAGS and kind == CONTROL)}
        if names & {"<|call|>", "<|calls|>"} and names & {"<|return|>", "<|flush|>"}:
            names.discard("<|end|>")  # gpt-oss and Solar write it between the messages of a turn
        if "<|tool_response>" in names:
            names.discard("</s>")  # to Gemma 4 it is text
        return {self.ids[name] for name in names}

    def get_special_token(self, key: str) -> str | None:
        """Return the token with a role such as "bos"; None if the file names none."""
        index = self.get_token_id(key)
        if isinstance(index, str | list):
            raise SettingsError(f"{PREFIX}{key}_token_id should be the number of a token")
        return self.tokens[index] if type(index) is int and 0 <= index < len(self.tokens) else None

    @property
    def merges(self) -> list[str]:
        return self._get_list("merges", str)

    @property
    def is_gemma(self) -> bool:
        return str(self._metadata.get("general.architecture")).startswith("gemma")


def _make_bpe(ids: Mapping[str, int], merges: list[tuple[str, str]], **options: Any) -> Tokenizer:
    try:
        return Tokenizer(models.BPE(dict(ids), merges, **options))
    except Exception as error:  # the tokenizers library raises plain Exception
        raise SettingsError(f"the tokenizer's merges do not fit its vocabulary: {error}") from None


# ---------------------------------------------------------------- byte pairs
def _find_pre_tokenizer(vocabulary: _Vocabulary) -> PreTokenizer:
    name = vocabulary.get("pre", DEFAULT)
    if name == DEFAULT:
        log.warning("the GGUF file does not say how its tokenizer splits text: a newer file of the model may be better")
    if name not in PRE_TOKENIZERS:
        raise SettingsError(
            f"the pre-tokenizer ({PREFIX}pre) {name!r} is not known: it should be one of {', '.join(PRE_TOKENIZERS)}; "
            "if the file is old, convert the model again"
        )
    return PRE_TOKENIZERS[name]


def _make_byte_level(vocabulary: _Vocabulary, pre_tokenizer: PreTokenizer) -> Tokenizer:
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in vocabulary.merges)]
    tokenizer = _make_bpe(vocabulary.ids, merges, ignore_merges=pre_tokenizer.ignore_merges)
    if pre_tokenizer.nfc:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if pre_tokenizer.digits else []
    splits = (pre_tokenizer.regex,) if pre_tokenizer.regex else pre_tokenizer.splits
    steps += [pre_tokenizers.Split(Regex(each), "isolated") for each in splits]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not splits))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


# ---------------------------------------------------------------- SentencePiece
def _make_sentence_piece(vocabulary: _Vocabulary) -> Tokenizer:
    """Make a tokenizer of byte pairs over characters, with byte fallback and U+2581 for spaces."""
    unknown = next((vocabulary.tokens[i] for i, kind in enumerate(vocabulary.types) if kind == UNKNOWN), None)
    tokenizer = _make_bpe(vocabulary.ids, _merges(vocabulary), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    spaces = normalizers.Replace(" ", SPACE)
    joined: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.get("add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces])
        joined.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(joined)
    return tokenizer


def _escape_spaces(token: str) -> str:
    """Return a token as SentencePiece writes it: GGUF files may write a run of spaces without U+2581."""
    return token if token.strip(" ") else SPACE * len(token)


def _merges(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Return the BPE merges: every pair of tokens that together are a token, in the order of that token's score."""
    ids, whole = vocabulary.ids, {CONTROL, UNKNOWN}
    ranked = [i for i, token in enumerate(vocabulary.tokens) if len(token) > 1 and vocabulary.types[i] not in whole]
    if not vocabulary.is_gemma:  # Gemma's scores do not rank its added tokens, but the order of the file does
        ranked.sort(key=lambda i: -vocabulary.scores[i])
    merges = []
    for token in (vocabulary.tokens[i] for i in ranked):
        pairs = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        merges += sorted((p for p in pairs if p[0] in ids and p[1] in ids), key=lambda p: (ids[p[0]], ids[p[1]]))
    return merges


# ---------------------------------------------------------------- tokens that the tokenizer never splits
def _add_tokens(tokenizer: Tokenizer, vocabulary: _Vocabulary) -> None:
    """Add the control tokens, which have no text, and the user-defined tokens, which have; neither are ever split."""
    named = {vocabulary.get_special_token(key) for key in ("bos", *END_ROLES, "unknown", "padding")}
    control, defined = [], []
    for index, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)):
        if kind in (CONTROL, UNKNOWN) or token in named or index in vocabulary.ends:
            control.append(AddedToken(token, normalized=False, special=True))
        elif kind == USER_DEFINED and token.strip(SPACE):  # runs of spaces are not added: merges make them
            defined.append(AddedToken(token, normalized=False, special=False))
    tokenizer.add_special_tokens(control)
    tokenizer.add_tokens(defined)


def _set_post_processor(tokenizer: Tokenizer, config: Mapping[str, Any]) -> None:
    """Set the tokens that every text begins and ends with: BOS and EOS, as the configuration says."""
    before = [config["bos_token"]] if config["add_bos_token"] and "bos_token" in config else []
    after = [config["eos_token"]] if config["add_eos_token"] and "eos_token" in config else []
    if before or after:
        single = [*before, "$A", *after]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=single,
            pair=[*single, *(f"{piece}:1" for piece in (*before, "$B", *after))],
            special_tokens=[(token, tokenizer.token_to_id(token)) for token in {*before, *after}],
        )
