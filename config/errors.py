"""The error for a setting that cannot be used, and the words for what the operating system refuses."""

MAX_MESSAGE_LENGTH = 2000  # characters of a message; values that it quotes may be longer


class SettingsError(Exception):
    """An error that the user can mend; the message says what to change."""

    def __str__(self) -> str:
        """Return the message, without its middle if it is too long to be read."""
        message, half = super().__str__(), MAX_MESSAGE_LENGTH // 2
        return message if len(message) <= MAX_MESSAGE_LENGTH else f"{message[:half]} ... {message[-half:]}"


def format_error(error: Exception) -> str:
    """Return an error in words for the user: our own sentence, or what the operating system refuses and where."""
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    place = f" ({error.filename})" if error.filename else ""
    return f"the operating system refuses to go on: {error.strerror}{place}"
