#!/usr/bin/env python3
"""What conversion to a quarter of the keys costs on real text: models of several seeds, with and without data.

    scripts/convert_quality.py DATA --out DIR [--seeds 1,2,3] [--key-dim 32]

DATA is what `python -m data_prep homeassistant` made (its `bin` folder). For every seed an ordinary transformer is
trained, converted in the ways of `WAYS`, fine-tuned for an epoch (and so is the original, to tell what that alone
does), decoded and scored against the original with the paired bootstrap test. Every step is a command that a user
could give, skipped when it was finished before. Prints a table, writes results.json and results.png. About 25 minutes
a seed on two cores, most of them training and distilling.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tqdm import tqdm  # noqa: E402

from fairseq_collab.cli.ending import run_command  # noqa: E402
from fairseq_collab.errors import CollabError  # noqa: E402
from fairseq_collab.files import read_json, write_json  # noqa: E402

PLUGIN = ROOT / "fairseq_collab"
WIDTH, HEADS = 128, 8
TRAINING = [
    *("--user-dir", PLUGIN, "--cpu", "--share-all-embeddings", "--encoder-layers", 2, "--decoder-layers", 2),
    *("--encoder-embed-dim", WIDTH, "--decoder-embed-dim", WIDTH),
    *("--encoder-ffn-embed-dim", 4 * WIDTH, "--decoder-ffn-embed-dim", 4 * WIDTH),
    *("--encoder-attention-heads", HEADS, "--decoder-attention-heads", HEADS),
    *("--encoder-normalize-before", "--decoder-normalize-before", "--dropout", 0.1),
    *("--criterion", "label_smoothed_cross_entropy", "--label-smoothing", 0.1),
    *("--optimizer", "adam", "--adam-betas", "(0.9, 0.98)", "--clip-norm", 1.0, "--max-tokens", 1500),
    *("--num-workers", 0, "--log-format", "simple", "--log-interval", 200, "--no-epoch-checkpoints"),
]
UPDATES = 3600
WAYS: dict[str, list[Any]] = {
    "plain CP, dense": ["--mix-layout", "dense"],
    "plain CP": [],
    "weighted": ["--calibrate-sentences", 512],
    "refined": ["--calibrate-sentences", 4000, "--refine-steps", 200],
    "distilled": ["--calibrate-sentences", 16000, "--refine-steps", 200, "--distill-steps", 1200],
}
PAPER, TUNED, CONTROL = "plain CP, dense", "distilled + 1 epoch", "original + 1 epoch"


def build_parser() -> argparse.ArgumentParser:
    """The command line of this script."""
    parser = argparse.ArgumentParser(
        prog="convert_quality.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path, metavar="DATA", help="binarised corpus with train, valid and test")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="models, translations and results")
    parser.add_argument("--seeds", default="1,2,3", help="default: %(default)s")
    parser.add_argument("--key-dim", type=int, default=WIDTH // 4, metavar="R", help="default: %(default)s")
    parser.add_argument(
        "--calibrate", type=Path, metavar="DATA", help="unlabelled text (default: the source side of DATA)"
    )
    parser.add_argument("--updates", type=int, default=UPDATES, help="of each training (default: %(default)s)")
    return parser


def run(command: Sequence[Any], log: Path) -> None:
    """Runs a step; its output goes to `log`.

    Raises:
        CollabError: it failed; the last line of its output is quoted.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as stream:
        code = subprocess.run(
            [str(part) for part in command], stdout=stream, stderr=subprocess.STDOUT, cwd=ROOT
        ).returncode
    if code:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["no output"]
        raise CollabError(f"{' '.join(map(str, command[1:4]))} ... ended with status {code}: {lines[-1]} (log: {log})")


def source_side(data: Path, folder: Path) -> Path:
    """A folder with links to the dictionaries and the source side of the training text alone."""
    folder.mkdir(parents=True, exist_ok=True)
    index = next(data.glob("train.*-*.*.idx"), None)
    if index is None:
        raise CollabError(f"{data} has no binarised train split; give the bin folder of python -m data_prep")
    pair = index.name.split(".")[1]
    files = [*data.glob("dict.*.txt"), *data.glob(f"train.{pair}.{pair.split('-')[0]}.*")]
    for file in files:
        link = folder / file.name
        if not link.exists():
            link.symlink_to(file.resolve())
    return folder


def train(data: Path, folder: Path, seed: int, updates: int) -> Path:
    """An ordinary transformer; its checkpoint with the best validation loss."""
    best = folder / "checkpoint_best.pt"
    schedule = ["--lr-scheduler", "polynomial_decay", "--lr", 3e-3, "--warmup-updates", max(1, updates // 9)]
    schedule += ["--total-num-update", updates, "--max-update", updates, "--seed", seed]
    command = [sys.executable, "-m", "fairseq_cli.train", data, *TRAINING, "--arch", "transformer", *schedule]
    if not (folder / "trained").exists():
        run([*command, "--save-dir", folder], folder / "train.log")
        (folder / "trained").touch()
    return best


def tune(data: Path, start: Path, folder: Path, seed: int, log: Path) -> Path:
    """A model after an epoch more, at a learning rate that falls to 0.

    Args:
        start: the original or a converted model.
        log: of the original's training, which tells how many updates an epoch has.
    """
    found = re.search(r"epoch 001:\s+\d+ / (\d+) ", log.read_text(encoding="utf-8"))
    if found is None:
        raise CollabError(f"{log} does not tell how many updates an epoch has; remove its folder and start again")
    tuned = folder / "checkpoint_last.pt"
    converted = start.parent.name == "converted"
    command = [sys.executable, "-m", "fairseq_cli.train", data, *TRAINING, "--finetune-from-model", start]
    command += ["--arch", "transformer_collab", "--collab-config", start] if converted else ["--arch", "transformer"]
    command += ["--seed", seed]
    command += ["--lr-scheduler", "polynomial_decay", "--lr", 2e-3, "--total-num-update", found[1]]
    if not (folder / "trained").exists():
        run([*command, "--max-epoch", 1, "--save-dir", folder], folder / "train.log")
        (folder / "trained").touch()
    return tuned


def score(data: Path, checkpoint: Path, folder: Path) -> dict[str, Any]:
    """Bits a token on valid, and test translations in `folder` with their BLEU."""
    from fairseq_collab.checkpoint import load_checkpoint
    from fairseq_collab.fairseq_modules.observed import FairseqModel

    found = read_json(folder / "score.json")
    if found is None:
        command = [sys.executable, ROOT / "scripts/evaluate_bleu.py", data, "--path", checkpoint, "--cpu"]
        run([*command, "--out", folder, "--json", folder / "bleu.json"], folder / "bleu.log")
        bits = FairseqModel(load_checkpoint(checkpoint), data).bits_per_token("valid", progress=False)
        system = read_json(folder / "bleu.json")["systems"][0]
        found = {"bits": bits, "bleu": system["bleu"]["score"], "signature": system["bleu"]["signature"]}
        write_json(folder / "score.json", found)
    return found


def compare(original: Path, other: Path) -> dict[str, float]:
    """Difference of BLEU and its p-value, from two folders of translations."""
    if not (other / "compared.json").exists():
        files = [folder / "translations.txt" for folder in (original, other)]
        command = [sys.executable, ROOT / "scripts/evaluate_bleu.py", "--compare", *files]
        run([*command, "--ref", original / "references.txt", "--json", other / "compared.json"], other / "compare.log")
    result = read_json(other / "compared.json")["comparison"]["bleu"]
    return {"difference": result["difference"], "p": result["p_value"]}


def one_seed(args: argparse.Namespace, seed: int, text: Path, bar: tqdm) -> list[dict[str, Any]]:
    """The rows of one seed: the original first."""
    base = args.out / f"seed{seed}"

    def step(title: str) -> None:
        bar.set_postfix_str(f"seed {seed}: {title}")
        bar.update()

    bar.set_postfix_str(f"seed {seed}: training")
    original = train(args.data, base / "original", seed, args.updates)
    rows = [{"way": "original", **score(args.data, original, base / "scored" / "original")}]
    step("converting")
    for way, flags in WAYS.items():
        name = way.replace(", ", "-").replace(" ", "-")
        path, report = base / "converted" / f"{name}.pt", base / "converted" / name
        calibrate = ["--calibrate", text] if "--calibrate-sentences" in flags else []
        command = [sys.executable, "-m", "fairseq_collab.cli.convert", "--path", original, "--output", path]
        if not path.exists():
            command += ["--key-dim", args.key_dim, *calibrate, *flags, "--report", report]
            run(command, base / "converted" / f"{name}.log")
        scored = base / "scored" / name
        signature = read_json(report / "report.json")["signature"]
        row = {"way": way, "conversion": signature, **score(args.data, path, scored)}
        rows.append({**row, **compare(base / "scored" / "original", scored)})
        step(way)
    for way, start, folder in (
        (TUNED, base / "converted" / "distilled.pt", "tuned"),
        (CONTROL, original, "original-tuned"),
    ):
        tuned = tune(args.data, start, base / folder, seed, base / "original" / "train.log")
        row = {"way": way, **score(args.data, tuned, base / "scored" / folder)}
        rows.append({**row, **compare(base / "scored" / "original", base / "scored" / folder)})
        step(way)
    return [{"seed": seed, **row} for row in rows]


def table(rows: list[dict[str, Any]]) -> str:
    """Means over seeds, with the range, and how many seeds differ significantly from the original."""
    ways = list(dict.fromkeys(row["way"] for row in rows))
    original = {row["seed"]: row for row in rows if row["way"] == "original"}
    lost = {way: [row["bits"] - original[row["seed"]]["bits"] for row in rows if row["way"] == way] for way in ways}
    lines = ["| | bits a token | lost | share of plain CP's loss | BLEU | difference | p < 0.05 |", "|" + " --- |" * 7]
    for way in ways:
        mine = [row for row in rows if row["way"] == way]
        cells = [way, f"{statistics.mean(row['bits'] for row in mine):.3f}"]
        if way == "original":
            cells += ["", "", f"{statistics.mean(row['bleu'] for row in mine):.2f}", "", ""]
        else:
            shares = [a / b for a, b in zip(lost[way], lost[PAPER], strict=True)]
            differences = [row["difference"] for row in mine]
            cells += [f"{statistics.mean(lost[way]):.3f} ({min(lost[way]):.3f} to {max(lost[way]):.3f})"]
            cells += [f"{statistics.mean(shares):.2f}", f"{statistics.mean(row['bleu'] for row in mine):.2f}"]
            cells += [f"{statistics.mean(differences):+.2f} ({min(differences):+.2f} to {max(differences):+.2f})"]
            cells += [f"{sum(row['p'] < 0.05 for row in mine)} of {len(mine)}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", f"BLEU: {rows[0]['signature']}", f"seeds: {', '.join(map(str, original))}"]) + "\n"


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Lost bits and BLEU by way, a point a seed; nothing without matplotlib."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return
    ways = [way for way in dict.fromkeys(row["way"] for row in rows) if way != "original"]
    original = {row["seed"]: row for row in rows if row["way"] == "original"}
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 3.4), layout="constrained", sharey=True)
    for axis, key, title in zip(
        axes, ("bits", "bleu"), ("bits a token lost (valid)", "BLEU difference (test)"), strict=True
    ):
        for place, way in enumerate(ways):
            values = [row[key] - original[row["seed"]][key] for row in rows if row["way"] == way]
            axis.scatter(values, [place] * len(values), color="#4477aa", alpha=0.6)
            axis.scatter(statistics.mean(values), place, color="#222222", marker="|", s=200)
        axis.axvline(0, color="#888888", linewidth=0.8)
        axis.set(xlabel=title, yticks=range(len(ways)), yticklabels=ways)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].invert_yaxis()
    temporary = path.with_name(f".{path.name}")
    figure.savefig(temporary, format="png", dpi=130)
    pyplot.close(figure)
    temporary.replace(path)


def run_seeds(args: argparse.Namespace) -> None:
    """All seeds, then the table and the picture."""
    if not re.fullmatch(r"\d+(,\d+)*", args.seeds):
        raise CollabError(f"--seeds {args.seeds} is no list of whole numbers such as 1,2,3")
    if not args.data.is_dir():
        raise CollabError(f"there is no folder {args.data}; make it with python -m data_prep homeassistant")
    seeds = [int(seed) for seed in args.seeds.split(",")]
    text = args.calibrate or source_side(args.data, args.out / "text")
    rows: list[dict[str, Any]] = []
    with tqdm(total=len(seeds) * (len(WAYS) + 3), unit="step") as bar:
        for seed in seeds:
            rows += one_seed(args, seed, text, bar)
            write_json(args.out / "results.json", rows)
    plot(rows, args.out / "results.png")
    print(table(rows), end="")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line."""
    args = build_parser().parse_args(argv)
    args.out = args.out.resolve()
    when_interrupted = "the same command continues where it was"
    return run_command("convert_quality.py", lambda: run_seeds(args), when_interrupted)


if __name__ == "__main__":
    sys.exit(main())
