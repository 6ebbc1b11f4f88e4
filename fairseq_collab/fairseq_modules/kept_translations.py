"""Translations of a decode that may be interrupted, kept in a file batch by batch. Decoding is `translate`'s."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from fairseq_collab.files import write_text


def fingerprint(models: Iterable[torch.nn.Module]) -> str:
    """SHA-256 of the weights of all models."""
    digest = hashlib.sha256()
    for model in models:
        for tensor in model.state_dict().values():
            digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


class KeptTranslations:
    """What was translated so far: `found` has text and tokens by number of the sentence.

    The file has a line of JSON for each batch, after one with what decides the translations. A file of other
    translations is begun anew, and what follows a line that was not finished is left out.

    Args:
        path: the file; nothing is kept when None. identity: what decides the translations, as JSON values.
    """

    def __init__(self, path: Path | None, identity: Mapping[str, Any]) -> None:
        self.path = path
        self.found: dict[int, tuple[str, int]] = {}
        self.seconds, self.unknown = 0.0, 0
        if path is None:
            return
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1] if path.exists() else []
        head = json.dumps(identity, sort_keys=True)
        batches = _whole(lines[1:]) if lines[:1] == [head] else []
        write_text(path, "".join(f"{line}\n" for line in (head, *map(json.dumps, batches))))
        for batch in batches:
            self._take(batch)

    def add(self, sentences: Mapping[int, tuple[str, int]], seconds: float, unknown: int) -> None:
        """Keep a batch.

        Args:
            sentences: text and tokens by number. seconds: that it took. unknown: source tokens that are not known.
        """
        batch = {"sentences": [[key, *value] for key, value in sentences.items()], "seconds": seconds}
        batch["unknown"] = unknown
        self._take(batch)
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(batch) + "\n")

    def _take(self, batch: dict[str, Any]) -> None:
        self.found.update({key: (text, tokens) for key, text, tokens in batch["sentences"]})
        self.seconds += batch["seconds"]
        self.unknown += batch["unknown"]


def _whole(lines: Iterable[str]) -> list[dict[str, Any]]:
    """The batches before the first line that is none."""
    batches = []
    for line in lines:
        try:
            batch = json.loads(line)
            batches.append({key: batch[key] for key in ("sentences", "seconds", "unknown")})
        except (ValueError, KeyError, TypeError):
            break
    return batches
