"""The one exception type that reports a mistake in what the user gave, and how several reasons become its text."""

from collections.abc import Iterable

PLACE = "\0"  # where a reason names the place that it holds for


class CollabError(ValueError):
    """What was wrong, where, and what to do, in a sentence that needs no traceback; or several, a line each."""


def one_a_line(reasons: Iterable[str]) -> str:
    """The text of all reasons, each once and on its own line."""
    return "\n".join(dict.fromkeys(reasons))


def merge_places(reasons: Iterable[tuple[str, str]]) -> list[str]:
    """Each reason once, with all the places that it holds for.

    Args:
        reasons: pairs of a place, such as the name of an attention, and a reason that has ``PLACE`` where it is named.
    """
    places: dict[str, list[str]] = {}
    for place, reason in reasons:
        places.setdefault(reason, []).append(place)
    return [reason.replace(PLACE, ", ".join(names)) for reason, names in places.items()]
