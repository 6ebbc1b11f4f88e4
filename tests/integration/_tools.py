"""Many fairseq commands without paying for many imports, and what several integration tests read from their output.

`CommandServer` holds a process that has imported fairseq and not the plugin; each command runs in a fork of it, with
its own arguments, streams and exit status, as the console scripts of fairseq would run it. No tests here.
"""

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Sequence

from _stock import skip_where_stock_fails

SERVER = """
import importlib, json, logging, os, sys
import fairseq.checkpoint_utils, fairseq.hub_utils, fairseq.options, fairseq.sequence_generator, fairseq.trainer
import fairseq.tasks, sacrebleu
assert "fairseq_collab" not in sys.modules

def run(order):
    os.chdir(order["cwd"])
    for fd, name, mode in ((0, order["stdin"], os.O_RDONLY), (1, order["stdout"], os.O_WRONLY | os.O_CREAT)):
        opened = os.open(name, mode)
        os.dup2(opened, fd)
    os.dup2(1, 2)
    logging.getLogger().handlers.clear()
    sys.argv = ["fairseq-" + order["command"].replace("_", "-"), *order["args"]]
    sys.stdin = open(0, encoding="utf-8")
    sys.stdout = open(1, "w", encoding="utf-8", buffering=1, closefd=False)
    sys.stderr = open(2, "w", encoding="utf-8", buffering=1, closefd=False)
    try:
        importlib.import_module("fairseq_cli." + order["command"]).cli_main()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0

print("ready", flush=True)
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = run(json.loads(line))
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
"""


@dataclass(frozen=True)
class Finished:
    """How a command ended: its exit status, and standard output and error as one text."""

    returncode: int
    stdout: str

    def lines(self, letter: str) -> dict[int, list[str]]:
        """The lines `H-3<tab>...` of fairseq's generation by sentence, each without its first column."""
        found: dict[int, list[str]] = {}
        for number, rest in re.findall(rf"^{letter}-(\d+)\t(.*)$", self.stdout, re.MULTILINE):
            found.setdefault(int(number), []).append(rest)
        return found

    def hypotheses(self) -> dict[int, tuple[str, float]]:
        """The best hypothesis of every sentence and its score."""
        best = {number: lines[0].split("\t") for number, lines in self.lines("H").items()}
        return {number: (text, float(score)) for number, (score, text) in best.items()}

    def losses(self) -> list[tuple[int, float]]:
        """The training loss of every epoch that ran, with the epoch."""
        found = re.findall(r"\| train \| .*?epoch (\d+) .*?\| loss ([\d.]+)", self.stdout)
        return [(int(epoch), float(loss)) for epoch, loss in found]


class CommandServer:
    """Runs fairseq commands in forks of one process.

    Args:
        folder: where streams go and where the commands run.
        env: the environment of the process.
    """

    def __init__(self, folder: Path, env: dict[str, str]):
        self.folder = folder
        self.count = 0
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
            cwd=folder,
        )
        self._answer()

    def _answer(self) -> str:
        line = self.process.stdout.readline()
        assert line, "the process that runs fairseq's commands has ended"
        return line.strip()

    def __call__(self, command: str, *args: Any, check: bool = True, input: str = "", cwd: Any = None) -> Finished:
        """Runs `fairseq-<command>`; `check` asserts that it succeeds, `input` is its standard input."""
        self.count += 1
        stdin, stdout = self.folder / f"{self.count}.in", self.folder / f"{self.count}.out"
        stdin.write_text(input, encoding="utf-8")
        order = {
            "command": command.replace("-", "_"),
            "args": [str(arg) for arg in args],
            "stdin": str(stdin),
            "stdout": str(stdout),
            "cwd": str(cwd or self.folder),
        }
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        code = int(self._answer())
        finished = Finished(code, stdout.read_text(encoding="utf-8", errors="replace"))
        assert code == 0 or not check, f"fairseq-{command} ended with status {code}:\n{finished.stdout[-5000:]}"
        return finished

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(timeout=30)
        self.process.stdout.close()


HEADS = ("--encoder-attention-heads", 4, "--decoder-attention-heads", 4)
SMALL = ("--arch", "transformer_collab_tiny", *HEADS)
WINDOW = (*SMALL, "--key-dim", 16, "--mix-dim", 8, "--mix-layout", "window")
DENSE = (*SMALL, "--key-dim", 16)


def train_flags() -> tuple[Any, ...]:
    """Flags of every toy training; those that come later on the command line win."""
    return (
        *("--share-all-embeddings", "--optimizer", "adam", "--lr", 0.005, "--dropout", 0.0, "--clip-norm", 1.0),
        *("--max-tokens", 800, "--max-epoch", 1, "--required-batch-size-multiple", 1, "--num-workers", 0, "--cpu"),
        *("--log-format", "simple", "--log-interval", 1000),
    )


def encoder_flags() -> tuple[Any, ...]:
    """Flags of a small RoBERTa on `toy_data`, which lies in `dict.txt`, `train.bin` and so on."""
    return (
        *("--task", "masked_lm", "--criterion", "masked_lm", "--sample-break-mode", "eos", "--tokens-per-sample", 32),
        *SMALL_ENCODER,
        *("--optimizer", "adam", "--lr", 0.005, "--dropout", 0.0, "--attention-dropout", 0.0, "--clip-norm", 1.0),
        *("--max-tokens", 800, "--max-epoch", 1, "--required-batch-size-multiple", 1, "--num-workers", 0, "--cpu"),
        *("--log-format", "simple", "--log-interval", 1000),
    )


def classifier_flags() -> tuple[Any, ...]:
    """Flags that go on with such an encoder on `toy_classes`."""
    flags = list(encoder_flags())
    for name in ("--task", "--criterion", "--sample-break-mode", "--tokens-per-sample"):
        position = flags.index(name)
        del flags[position : position + 2]
    return (
        *("--task", "sentence_prediction", "--criterion", "sentence_prediction", "--num-classes", 2),
        *("--init-token", 0, "--max-positions", 32, *flags),
    )


def denoising_flags() -> tuple[Any, ...]:
    """Flags of a small BART on `toy_data`, pretrained to undo masks and the order of sentences.

    Skips the test where fairseq does not take them.
    """
    skip_where_stock_fails("denoising")
    flags = list(encoder_flags()[4:])
    return (
        *("--task", "denoising", "--mask", 0.3, "--mask-length", "subword", "--replace-length", 1, "--rotate", 0.0),
        *("--permute-sentences", 0, "--decoder-layers", 2, "--decoder-attention-heads", 4, *flags),
        *("--max-source-positions", 64, "--max-target-positions", 64),
    )


SMALL_ENCODER = (
    *("--encoder-layers", 2, "--encoder-embed-dim", 64, "--encoder-ffn-embed-dim", 64),
    *("--encoder-attention-heads", 4),
)


def attentions(model: Any) -> dict[str, Any]:
    """The attention modules of a model of fairseq by name, such as `encoder.0` or `cross.1`."""
    found = {}
    for side in ("encoder", "decoder"):
        stack = getattr(model, side, None)
        stack = getattr(stack, "sentence_encoder", stack)
        for number, layer in enumerate(getattr(stack, "layers", ())):
            found[f"{side}.{number}"] = layer.self_attn
            if getattr(layer, "encoder_attn", None) is not None:
                found[f"cross.{number}"] = layer.encoder_attn
    return found


def shaken(path: Any, size: float = 0.15) -> Any:
    """Adds noise to all weights of a checkpoint, so that a model that has hardly learnt anything answers every sentence
    differently; ties stay. Returns the path.
    """
    import torch

    state = torch.load(path)
    generator = torch.Generator().manual_seed(1)
    for tensor in {tensor.data_ptr(): tensor for tensor in state["model"].values()}.values():
        if tensor.is_floating_point() and tensor.dim():
            tensor.add_(size * torch.randn(tensor.shape, generator=generator))
    torch.save(state, path)
    return path


def assert_flags_rebuild(fairseq, printed, data, plugin_dir, folder):
    """That training with the flags that a conversion into `folder` printed builds the model that it wrote."""
    import torch

    flags = re.search(r"fairseq-train DATA --user-dir fairseq_collab (.*)", printed).group(1).split()
    fairseq(
        *("train", data, "--user-dir", plugin_dir, "--save-dir", folder / "tuned", *flags, "--lr", 1e-30),
        *("--max-epoch", 1, "--cpu", "--num-workers", 0),
    )
    files = (folder / "converted.pt", folder / "tuned" / "checkpoint_last.pt")
    assert_same_weights(*files)
    first, second = (torch.load(file) for file in files)
    for option in ("activation_fn", "encoder_normalize_before", "no_scale_embedding", "layernorm_embedding"):
        assert getattr(first["cfg"]["model"], option) == getattr(second["cfg"]["model"], option), option


def weights_of(path: Any) -> dict[str, Any]:
    """The weights in a checkpoint, without a buffer that fairseq 0.12.2 saves but never initialises."""
    import torch

    weights = torch.load(path, weights_only=True)["model"]
    return {key: tensor for key, tensor in weights.items() if not key.endswith("_float_tensor")}


def assert_same_weights(path: Any, other: Any) -> None:
    """That two checkpoints hold the same model."""
    import torch

    weights, others = weights_of(path), weights_of(other)
    assert weights.keys() == others.keys()
    assert not [key for key, tensor in weights.items() if not torch.equal(tensor, others[key])]


def key_dims(model: Any) -> dict[str, int]:
    """The width of queries and keys of every attention of `attentions`."""
    return {name: module.q_proj.weight.size(0) for name, module in attentions(model).items()}


def build(plugin: Any, flags: Sequence[Any], words: int = 20, device: str = "cpu") -> Any:
    """The model that a `fairseq-train` command line describes, for a joined dictionary of `words` words.

    Args:
        plugin: the fixture of that name.
        flags: from `--arch` on.
    """
    import torch
    from fairseq import options
    from fairseq.data import Dictionary
    from fairseq.models import ARCH_MODEL_REGISTRY

    parser = options.get_training_parser()
    args = options.parse_args_and_arch(parser, [str(flag) for flag in ("DATA", *flags)])
    dictionary = Dictionary()
    for number in range(words):
        dictionary.add_symbol(f"w{number}")

    class Task:
        source_dictionary = target_dictionary = output_dictionary = dictionary

    Task.dictionary, Task.args, Task.cfg = dictionary, args, args
    with torch.device(device):
        return ARCH_MODEL_REGISTRY[args.arch].build_model(args, Task)
