"""What the recipes are: data, model, optimisation, batch and decoding of each, full and tiny. `recipes.py` runs them.

Where a figure was published is said at the top of the shell script of the recipe, and in docs/recipes.md.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from fairseq_collab.errors import CollabError  # noqa: E402


@dataclass(frozen=True)
class Batch:
    """What one update sees, whatever the number of processes.

    Args:
        total: tokens or sequences of an update. share: the most that a process takes at once.
        least: what it must be able to take, such as the longest sentence.
        unit: ``tokens`` or ``sequences``. flag: of ``fairseq-train``. variable: of the environment, for the share.
    """

    total: int
    share: int
    least: int
    unit: str = "tokens"
    flag: str = "--max-tokens"
    variable: str = "MAX_TOKENS"

    def divide(self, processes: int) -> tuple[int, int]:
        """``--update-freq`` and the share of a process, at most `share`, whose product with `processes` is `total`.

        Where `total` cannot be divided so, the product is less by at most one a process and step.

        Raises:
            CollabError: the share would be below `least`.
        """
        if self.share < self.least:
            raise CollabError(f"{self.variable}={self.share} is too little for one process: give {self.least} or more")
        update_freq = -(-self.total // (processes * self.share))
        share = self.total // (processes * update_freq)
        if share < self.least:
            raise CollabError(
                f"an update of {self.total:,} {self.unit} cannot be divided among {processes:,} processes of at least "
                f"{self.least} {self.unit}: start at most {self.total // self.least:,} processes"
            )
        return update_freq, share

    def describe(self, processes: int) -> str:
        """The division in words, with what is lost to rounding."""
        update_freq, share = self.divide(processes)
        product = processes * update_freq * share
        text = f"{processes} process(es) x --update-freq {update_freq} x {share:,} {self.unit} = {product:,} an update"
        return text if product == self.total else f"{text}, rounded down from {self.total:,}"


@dataclass(frozen=True)
class Recipe:
    """One recipe.

    Args:
        data: binarised folder. prepare: the command that makes it. save_dir: the start of the default save-dir's name.
        heads: default of COLAB. key_dim: default of KEY_DIM. seed: default of SEED. batch: of one update.
        flags: of ``fairseq-train``. half: those for half precision, left out on CPUs.
        average: default of AVERAGE, the last checkpoints that are averaged; 0 takes the best one.
        decode: flags of ``evaluate_bleu.py``; none for a masked language model, which is validated.
        goals: BLEU whose time is printed. validate_every: share of an epoch between validations, 0 for whole epochs.
        langs: source and target of the small corpus.
    """

    data: str
    prepare: str
    save_dir: str
    heads: str
    key_dim: int
    seed: int
    batch: Batch
    flags: tuple[object, ...]
    half: tuple[object, ...] = ("--fp16",)
    average: int = 0
    decode: tuple[object, ...] = ()
    goals: tuple[float, ...] = ()
    validate_every: float = 0.0
    langs: tuple[str, str] = ("en", "de")


def override(flags: tuple[object, ...], more: tuple[object, ...]) -> tuple[object, ...]:
    """`flags` with those of `more` in the place of their namesakes, or at the end."""
    merged: dict[str, list[object]] = {}
    for part in (flags, more):
        name = ""
        for word in part:
            if isinstance(word, str) and word.startswith("--"):
                name, merged[word] = word, []
            else:
                merged[name].append(word)
    return tuple(word for name, values in merged.items() for word in (name, *values))


ADAM = ("--optimizer", "adam", "--adam-betas", "(0.9, 0.98)", "--clip-norm", 0.0)
SMOOTHED = ("--criterion", "label_smoothed_cross_entropy", "--label-smoothing", 0.1)
BEAM_4 = ("--beam", 4, "--lenpen", 0.6)
AS_BLEU = ("--best-checkpoint-metric", "bleu", "--maximize-best-checkpoint-metric")
WMT = Recipe(
    data="data/wmt16/bin",
    prepare="python -m data_prep wmt16_en_de_bpe32k --destdir data/wmt16",
    save_dir="checkpoints/wmt16-en-de/base",
    heads="encoder_cross_decoder",
    key_dim=128,
    seed=1,
    batch=Batch(total=4 * 2 * 3584, share=3584, least=1024),
    flags=(
        *("--arch", "transformer_collab_wmt_en_de", "--share-all-embeddings", *ADAM, *SMOOTHED),
        *("--source-lang", "en", "--target-lang", "de", "--dropout", 0.1, "--weight-decay", 0.0),
        *("--lr", 7e-4, "--lr-scheduler", "inverse_sqrt", "--warmup-updates", 4000, "--warmup-init-lr", 1e-7),
        *("--stop-min-lr", 1e-9, "--max-update", 100_000),
        *("--keep-last-epochs", 10, "--save-interval-updates", 2000, "--keep-interval-updates", 1),
    ),
    average=10,
    decode=(*BEAM_4, "--detokenizer", "moses", "--compound-split"),
)
MLBENCH = Recipe(
    data="data/wmt17/bin",
    prepare="python -m data_prep wmt17_en_de --destdir data/wmt17",
    save_dir="checkpoints/mlbench-4b/transformer",
    heads="encoder_cross_decoder",
    key_dim=256,
    seed=42,
    batch=Batch(total=2**17, share=2**13, least=80),
    flags=(
        # pre-norm, width 1024, feed-forward 4096, 16 heads, dropout 0.1 in attention and after the activation
        *("--arch", "transformer_collab_wmt_en_de_big_t2t", "--share-all-embeddings", *ADAM, *SMOOTHED),
        *("--source-lang", "en", "--target-lang", "de", "--dropout", 0.1, "--adam-eps", 1e-9),
        *("--max-source-positions", 80, "--max-target-positions", 80, "--skip-invalid-size-inputs-valid-test"),
        *("--required-seq-len-multiple", 2, "--lr", 1.976e-3, "--lr-scheduler", "inverse_sqrt"),
        *("--warmup-updates", 1000, "--warmup-init-lr", 0.0, "--max-epoch", 10, "--valid-subset", "test"),
        *("--eval-bleu", "--eval-bleu-args", '{"beam": 4, "lenpen": 0.6}', "--eval-bleu-remove-bpe", "sentencepiece"),
        *("--eval-bleu-detok", "moses", "--eval-bleu-detok-args", '{"target_lang": "de"}', *AS_BLEU),
        *("--keep-last-epochs", 10, "--keep-interval-updates", 1),
    ),
    half=("--fp16", "--fp16-init-scale", 2**7, "--fp16-scale-window", 2000),
    decode=(*BEAM_4, "--detokenizer", "moses", "--compound-split"),
    goals=(25, 20),
    validate_every=0.3,
)
IWSLT = Recipe(
    data="data/iwslt14/bin",
    prepare="python -m data_prep iwslt14_de_en --destdir data/iwslt14",
    save_dir="checkpoints/iwslt14-de-en/small",
    heads="encoder_cross_decoder",
    key_dim=128,
    seed=1,
    batch=Batch(total=4096, share=4096, least=512),
    flags=(
        *("--arch", "transformer_collab_iwslt_de_en", "--share-decoder-input-output-embed", *ADAM, *SMOOTHED),
        *("--source-lang", "de", "--target-lang", "en", "--dropout", 0.3, "--weight-decay", 1e-4),
        *("--lr", 5e-4, "--lr-scheduler", "inverse_sqrt", "--warmup-updates", 4000, "--max-update", 50_000),
        *("--eval-bleu", "--eval-bleu-args", '{"beam": 5, "max_len_a": 1.2, "max_len_b": 10}'),
        *("--eval-tokenized-bleu", "--eval-bleu-remove-bpe", "sentencepiece", *AS_BLEU, "--keep-last-epochs", 10),
    ),
    decode=("--beam", 5, "--tokenize", "none"),
    langs=("de", "en"),
)
ROBERTA = Recipe(
    data="data/roberta/bin",
    prepare="python -m data_prep text --train TRAIN.txt --valid VALID.txt --destdir data/roberta",
    save_dir="checkpoints/roberta/base",
    heads="encoder",
    key_dim=192,
    seed=1,
    batch=Batch(total=2048, share=16, least=1, unit="sequences", flag="--batch-size", variable="MAX_SENTENCES"),
    flags=(
        *("--arch", "roberta_collab_base", "--task", "masked_lm", "--criterion", "masked_lm", *ADAM),
        *("--sample-break-mode", "complete", "--tokens-per-sample", 512, "--mask-prob", 0.15, "--adam-eps", 1e-6),
        *("--dropout", 0.1, "--attention-dropout", 0.1, "--weight-decay", 0.01, "--lr", 5e-4),
        *("--lr-scheduler", "polynomial_decay", "--warmup-updates", 10_000, "--total-num-update", 125_000),
        *("--max-update", 125_000, "--keep-last-epochs", 10, "--skip-invalid-size-inputs-valid-test"),
        *("--save-interval-updates", 2000, "--keep-interval-updates", 1),
        # else fairseq makes batches of 8 where a process takes 15 sequences
        *("--required-batch-size-multiple", 1),
    ),
)
RECIPES = {"wmt": WMT, "mlbench": MLBENCH, "iwslt": IWSLT, "roberta": ROBERTA}

TINY_KEY_DIM, TINY_VOCABULARY = 32, 2000
_TINY_ENCODER = ("--encoder-layers", 2, "--encoder-embed-dim", 128, "--encoder-ffn-embed-dim", 512)
_TINY_DECODER = ("--decoder-layers", 2, "--decoder-embed-dim", 128, "--decoder-ffn-embed-dim", 512)
_TINY_TRANSLATION = (
    *(*_TINY_ENCODER, *_TINY_DECODER, "--dropout", 0.1, "--lr", 2e-3, "--warmup-updates", 200, "--max-epoch", 5),
    *("--max-tokens-valid", 1000, "--num-workers", 0, "--log-interval", 20),
)
_TINY_FLAGS = {
    "wmt": ("--encoder-attention-heads", 8, "--decoder-attention-heads", 8, "--save-interval-updates", 300),
    "mlbench": (
        *("--encoder-attention-heads", 16, "--decoder-attention-heads", 16, "--max-valid-steps", 3),
        *("--eval-bleu-detok", "space", "--eval-bleu-detok-args", "{}"),
        *("--eval-bleu-args", '{"beam": 4, "lenpen": 0.6, "max_len_a": 1.2, "max_len_b": 10}'),
    ),
    "iwslt": ("--encoder-attention-heads", 8, "--decoder-attention-heads", 8, "--max-valid-steps", 7),
}


def tiny(name: str) -> Recipe:
    """The recipe with a small model, few updates, and the small corpus in place of its own."""
    recipe = replace(RECIPES[name], key_dim=TINY_KEY_DIM, average=3, half=())
    if name == "roberta":
        more = (*_TINY_ENCODER, "--encoder-attention-heads", 8, "--tokens-per-sample", 64, "--lr", 1e-3)
        more += ("--warmup-updates", 100, "--total-num-update", 1000, "--max-update", 1000, "--num-workers", 0)
        more += ("--log-interval", 20, "--save-interval-updates", 200)
        return replace(recipe, batch=replace(recipe.batch, total=32, share=32), flags=override(recipe.flags, more))
    return replace(
        recipe,
        batch=replace(recipe.batch, total=1000, share=1000, least=250),
        flags=override(recipe.flags, (*_TINY_TRANSLATION, *_TINY_FLAGS[name])),
        decode=recipe.decode[: 2 if name == "iwslt" else len(BEAM_4)],
        goals=(5, 2) if recipe.goals else (),
    )
