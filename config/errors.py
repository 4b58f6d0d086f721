"""What is raised for a setting, by whoever finds out that it cannot be used."""


class SettingsError(Exception):
    """The message tells the user what to change."""
