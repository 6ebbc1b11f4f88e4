"""Small files, written so that they are never half there. Checkpoints are ``checkpoint``'s."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_text(path: Path, text: str) -> None:
    """Writes under a temporary name beside ``path``, then renames; makes the folder where it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """:func:`write_text` of indented JSON."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    """The content of a JSON file, or None if there is no readable one."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def differences(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """Which entries of settings that a file keeps are not as wanted now, and how; empty if all are."""
    keys = [key for key in {**found, **wanted} if found.get(key) != wanted.get(key)]
    return ", ".join(f"{key} {found.get(key)!r} and now {wanted.get(key)!r}" for key in keys)
