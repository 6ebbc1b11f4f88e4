"""Scores of translations: sacreBLEU's BLEU and chrF, its paired bootstrap test, and the BLEU of older papers.

A system is a dictionary with ``path``, ``lines`` and ``references``; each score adds an entry. Decoding is elsewhere.
"""

import os
import re
from collections.abc import Sequence
from typing import Any

from fairseq_collab.errors import CollabError

BOOTSTRAP_SEED = 12345
_HYPHEN = re.compile(r"(\S)-(\S)")


def metrics_for(tokenize: str | None, target_lang: str | None) -> dict[str, Any]:
    """Fresh sacreBLEU metrics by name.

    Args:
        tokenize: sacreBLEU's tokenizer; by the language when None.

    Raises:
        CollabError: it has no such tokenizer.
    """
    from sacrebleu.metrics import BLEU, CHRF

    default = "zh" if re.match(r"zh\b|zh_", target_lang or "") else "13a"
    try:
        return {"bleu": BLEU(tokenize=tokenize or default), "chrf": CHRF()}
    except (AssertionError, ImportError, KeyError, RuntimeError) as error:
        raise CollabError(f"sacreBLEU has no usable tokenizer {tokenize!r}: {error}") from error


def score(system: dict[str, Any], metrics: dict[str, Any]) -> None:
    """Add `bleu` and `chrf`, each with `score` and `signature`, and the count of empty translations to `system`."""
    for name, metric in metrics.items():
        result = metric.corpus_score(system["lines"], [system["references"]])
        system[name] = {"score": result.score, "signature": metric.get_signature().format(short=False)}
    system["empty_translations"] = sum(not line for line in system["lines"])


def split_compounds(line: str) -> str:
    """A tokenised line with words cut at hyphens, the hyphen as a token of its own, as papers since GNMT score.

    The substitution is that of fairseq's and tensor2tensor's scripts to the letter: matches do not overlap, and hyphens
    that Google's WMT 2016 text writes as ##AT##-##AT## get two more tokens, in translations and references alike.
    """
    return _HYPHEN.sub(r"\1 ##AT##-##AT## \2", line)


def score_compound_split(system: dict[str, Any], lines: Sequence[str], references: Sequence[str], how: str) -> None:
    """Add `compound_split`, tokenised BLEU without smoothing on both sides cut by `split_compounds`, to `system`.

    Args:
        lines: tokenised translations. references: tokenised too. how: what tokenised them, for the signature.
    """
    from sacrebleu.metrics import BLEU

    metric = BLEU(tokenize="none", smooth_method="none", force=True)
    result = metric.corpus_score([*map(split_compounds, lines)], [[*map(split_compounds, references)]])
    signature = f"compound-split|{how}|{metric.get_signature().format(short=False)}"
    system["compound_split"] = {"score": result.score, "signature": signature}


def moses_tokenized(lines: Sequence[str], lang: str | None) -> list[str]:
    """Lines of natural text as Moses' rules cut them, without escapes.

    Raises:
        CollabError: sacremoses is not installed.
    """
    try:
        from sacremoses import MosesTokenizer
    except ImportError as error:
        raise CollabError(
            "--compound-split needs the package sacremoses for text that is not tokenised: pip install sacremoses"
        ) from error
    tokenizer = MosesTokenizer(lang or "en")
    return [tokenizer.tokenize(line, return_str=True, escape=False) for line in lines]


def paired_test(systems: list[dict[str, Any]], metrics: dict[str, Any], samples: int) -> dict[str, Any]:
    """sacreBLEU's paired bootstrap test of the second system against the first, by metric.

    Its p-value counts samples that differ by *more* than the systems do, so for translations that are equal to each
    other it would be as small as can be; here it is 1.
    """
    from sacrebleu.significance import PairedTest

    os.environ["SACREBLEU_SEED"] = str(BOOTSTRAP_SEED)
    named = [(f"{label}: {system['path']}", system["lines"]) for label, system in zip("AB", systems, strict=True)]
    labels = {metric.__class__.__name__: name for name, metric in metrics.items()}
    test = PairedTest(named, dict(metrics), [systems[0]["references"]], test_type="bs", n_samples=samples)
    signatures, results = test()
    comparison = {}
    for title, signature in signatures.items():
        name = next(short for label, short in labels.items() if title.upper().startswith(label))
        first, second = results[title]
        comparison[name] = {
            "difference": second.score - first.score,
            "p_value": 1.0 if systems[0]["lines"] == systems[1]["lines"] else second.p_value,
            "intervals": [[float(result.mean), float(result.ci)] for result in (first, second)],
            "signature": signature.format(short=False),
        }
    return comparison
