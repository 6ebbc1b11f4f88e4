"""Small archives of the translation campaigns, with the true names and formats inside, for tests of data_prep."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping
from pathlib import Path

ENGLISH = "the house of parliament said that it would not vote again on this matter today".split()
GERMAN = "das Haus des Parlaments sagte dass es heute nicht mehr über diese Sache abstimmt".split()


def sentences(count: int, start: int = 0) -> tuple[list[str], list[str]]:
    """English and German sentences of equal lengths, all different."""
    english = [" ".join([*ENGLISH[n % 7 : n % 7 + 3 + n % 5], str(n)]) for n in range(start, start + count)]
    german = [" ".join([*GERMAN[n % 7 : n % 7 + 3 + n % 5], str(n)]) for n in range(start, start + count)]
    return english, german


def write_archive(path: Path, members: Mapping[str, str | bytes]) -> Path:
    """A gzipped tar archive with a folder entry for each folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as archive:
        for folder in sorted({name.rsplit("/", 1)[0] for name in members if "/" in name}):
            info = tarfile.TarInfo(folder)
            info.type = tarfile.DIRTYPE
            archive.addfile(info)
        for name, text in members.items():
            content = text.encode() if isinstance(text, str) else text
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def lines(found: list[str]) -> str:
    return "".join(f"{line}\n" for line in found)


def segments(found: list[str], kind: str) -> str:
    """A test set as SGML or XML."""
    body = "\n".join(f'<seg id="{number}"> {line} </seg>' for number, line in enumerate(found, start=1))
    return f'<{kind} setid="x" srclang="any">\n<doc docid="1" genre="news">\n<p>\n{body}\n</p>\n</doc>\n</{kind}>\n'


def write_iwslt14(folder: Path, pairs: int = 120) -> Path:
    """``de-en.tgz`` with `pairs` clean training pairs, three that are dropped, and five test sets of two pairs."""
    english, german = sentences(pairs)
    members: dict[str, str | bytes] = {"de-en/README": "readme\n"}
    for lang, found in (("en", english), ("de", german)):
        long = " ".join(["Wort"] * (20 if lang == "de" else 3))
        head = (
            f"<url>http://www.ted.com/talks/{lang}</url>\n<keywords>talks, {lang}</keywords>\n<talkid>1</talkid>\n"
            f"<title>{found[0]}</title>\n<description>{found[1]}</description>\n"
        )
        gap = "\r\n" if lang == "en" else "nur deutsch\n"
        tail = f"{long}\n{gap}".encode() + (b"broken \xe4\n" if lang == "de" else b"broken\n")
        members[f"de-en/train.tags.de-en.{lang}"] = (head + lines(found[2:])).encode() + tail
        for number, name in enumerate(("TED.dev2010", "TEDX.dev2012", "TED.tst2010", "TED.tst2011", "TED.tst2012")):
            both = sentences(2, start=1000 + 10 * number)
            text = ["It\u2019s " + both[lang == "de"][0], both[lang == "de"][1]]
            members[f"de-en/IWSLT14.{name}.de-en.{lang}.xml"] = '<?xml version="1.0" encoding="UTF-8"?>\n' + segments(
                text, "refset"
            )
    return write_archive(folder / "de-en.tgz", members)


def write_wmt17(folder: Path) -> None:
    """The archives of WMT 2017: 40 pairs in each training corpus, newstest2013 of 4, newstest2014 of 3."""
    corpora = {
        "training-parallel-nc-v12.tgz": "training/news-commentary-v12.de-en",
        "training-parallel-commoncrawl.tgz": "commoncrawl.de-en",
        "training-parallel-europarl-v7.tgz": "training/europarl-v7.de-en",
        "rapid2016.tgz": "rapid2016.de-en",
    }
    for number, (name, prefix) in enumerate(corpora.items()):
        english, german = sentences(40, start=100 * number)
        members = {
            "training/europarl-v7.cs-en.en": "other\n",
            f"{prefix}.de": lines(german),
            f"{prefix}.en": lines(english),
        }
        write_archive(folder / name, members)
    english, german = sentences(4, start=900)
    write_archive(folder / "dev.tgz", {"dev/newstest2013.en": lines(english), "dev/newstest2013.de": lines(german)})
    english, german = sentences(3, start=950)
    test = {
        "test-full/newstest2014-deen-src.en.sgm": segments(english, "srcset"),
        "test-full/newstest2014-deen-ref.de.sgm": segments(german, "refset"),
    }
    write_archive(folder / "test-full.tgz", test)


def write_wmt16(folder: Path, pairs: int = 60) -> Path:
    """``wmt16_en_de.tar.gz`` with BPE text of `pairs` training pairs and one with an empty side."""
    english, german = sentences(pairs)
    members = {
        "vocab.bpe.32000": lines(sorted({word for line in english + german for word in line.split()}) + ["par@@"])
    }
    for lang, found in (("en", english), ("de", german)):
        members[f"train.tok.clean.bpe.32000.{lang}"] = lines([*found, "par@@ liament" if lang == "en" else ""])
        for name, start in (("newstest2013", 900), ("newstest2014", 950)):
            natural = sentences(3, start)[lang == "de"]
            members[f"{name}.{lang}"] = lines([f"{line}." for line in natural])
            members[f"{name}.tok.bpe.32000.{lang}"] = lines([f"{line} @-@ ." for line in natural])
    return write_archive(folder / "wmt16_en_de.tar.gz", members)
