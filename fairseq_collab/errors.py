"""The one exception type that reports a mistake in what the user gave. Nothing else lives here."""


class CollabError(ValueError):
    """What was wrong, where, and what to do, in one sentence that needs no traceback."""
