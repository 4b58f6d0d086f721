"""The error for a setting that cannot be used, and messages for errors of the operating system."""

MAX_MESSAGE_LENGTH = 2000  # characters of a message; values that it quotes may be longer


class SettingsError(Exception):
    """An error that the user can fix; the message says what to change."""

    def __str__(self) -> str:
        """Return the message; a very long one without its middle."""
        message, half = super().__str__(), MAX_MESSAGE_LENGTH // 2
        return message if len(message) <= MAX_MESSAGE_LENGTH else f"{message[:half]} ... {message[-half:]}"


def format_error(error: Exception) -> str:
    """Return an error's message for the user; of an OSError, what the operating system refuses, and of which file."""
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    place = f" ({error.filename})" if error.filename else ""
    return f"the operating system refuses to go on: {error.strerror}{place}"
