"""Errors of encoding and decoding texts, with messages for the client. Knows neither HTTP nor processes."""

from __future__ import annotations


class TextError(Exception):
    """A text could not be converted to tokens, or tokens to a text; the message is for the client."""


class TextRefused(TextError):
    """Text or messages that cannot be encoded; another attempt would fail, too."""

    code: str | None = None  # `error.code` of the response


class TextUnavailable(TextError):
    """No text can be encoded at the moment; a later attempt may succeed."""


class ChatTemplateError(TextRefused):
    """The chat template cannot make a prompt of these messages."""


class TextTooLong(TextRefused):
    """The prompt made of these messages has more characters than the context can hold."""

    code = "context_length_exceeded"


class InfillError(TextRefused):
    """The model has no special tokens for fill-in-the-middle prompts."""


class GrammarError(TextRefused):
    """A grammar, schema or regular expression that is wrong, or that is not supported."""

    code = "invalid_grammar"


class TokenizerError(TextRefused):
    """The model's tokenizer failed; the message may quote the text."""

    code = "tokenizer_failed"


class TextLimitError(TextRefused):
    """Encoding a text took more time or memory than is allowed, or crashed the process that did it."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


MAX_REASON_LENGTH = 300  # most characters of a library's error message that are shown


def shorten_message(error: BaseException) -> str:
    """Return an exception's message, cut to MAX_REASON_LENGTH characters."""
    return str(error)[:MAX_REASON_LENGTH]


def wrap_tokenizer_error(
    error: BaseException, prefix: str = "the model's tokenizer fails on this text"
) -> BaseException:
    """Return a TokenizerError for an exception of the tokenizers library; return any other exception unchanged."""
    if isinstance(error, TextError | MemoryError):
        return error
    if is_tokenizers_error(error):
        return TokenizerError(f"{prefix}: {shorten_message(error)}")
    return error


def is_tokenizers_error(error: BaseException) -> bool:
    """Return whether the tokenizers library may have raised the error: an Exception, or a panic of its Rust code.

    A panic's class derives from BaseException and cannot be imported, so it is known by its name.
    """
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"
