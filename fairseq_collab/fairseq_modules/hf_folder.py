"""A folder of Hugging Face's transformers as a training meets it: configuration, weights, vocabulary, heads.

Reads such a folder and says in a sentence what it lacks. The model made of it is ``hf_encoder``.
"""

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fairseq_collab._transformers import import_transformers, load_tokenizer, quiet
from fairseq_collab.errors import CollabError
from fairseq_collab.pretrained import MODEL_TYPE

WEIGHT_FILES = ("model*.safetensors", "pytorch_model*.bin")
NAMED_BY_ID = re.compile(r"madeupword(\d+)")


@dataclass(frozen=True)
class Family:
    """What the models of one ``model_type`` call things.

    Args:
        dropout, attention_dropout, pooler_dropout: entries of the configuration.
        dense: prefix of the layer before the classifier in models for sequence classification.
        activation: what follows it.
        segments: whether the model tells the first from the second sentence.
        predict: the logits of a model for masked language modelling from its features.
    """

    dropout: str
    attention_dropout: str
    pooler_dropout: str
    dense: str
    activation: Callable[[Tensor], Tensor]
    segments: bool
    predict: Callable[[nn.Module, Tensor], Tensor]


def _predict_distilbert(model: nn.Module, features: Tensor) -> Tensor:
    hidden = model.activation(model.vocab_transform(features))
    return model.vocab_projector(model.vocab_layer_norm(hidden))


FAMILIES = {
    "bert": Family(
        dropout="hidden_dropout_prob",
        attention_dropout="attention_probs_dropout_prob",
        pooler_dropout="classifier_dropout",
        dense="bert.pooler.dense",
        activation=torch.tanh,
        segments=True,
        predict=lambda model, features: model.cls(features),
    ),
    "distilbert": Family(
        dropout="dropout",
        attention_dropout="attention_dropout",
        pooler_dropout="seq_classif_dropout",
        dense="pre_classifier",
        activation=torch.relu,
        segments=False,
        predict=_predict_distilbert,
    ),
    "albert": Family(
        dropout="hidden_dropout_prob",
        attention_dropout="attention_probs_dropout_prob",
        pooler_dropout="classifier_dropout_prob",
        dense="albert.pooler",
        activation=torch.tanh,
        segments=True,
        predict=lambda model, features: model.predictions(features),
    ),
}


def config_of(text: str) -> Any:
    """The configuration object of ``text``, JSON with a ``model_type``."""
    values = json.loads(text)
    return import_transformers().AutoConfig.for_model(values.pop("model_type"), **values)


def read_config(folder: str, model_type: str) -> str:
    """The configuration of a folder as one line of JSON.

    Raises:
        CollabError: no such folder, no configuration, or that of another kind of model.
    """
    path = Path(folder)
    if not path.is_dir():
        raise CollabError(f"--hf-model {folder}: there is no such folder; give one that transformers saved")
    if not (path / "config.json").is_file():
        raise CollabError(f"--hf-model {folder} has no config.json; give a folder that transformers saved")
    try:
        found = json.loads((path / "config.json").read_text(encoding="utf-8"))
        theirs = found.get("model_type")
    except (ValueError, AttributeError) as error:
        raise CollabError(f"--hf-model {folder}: its config.json is no configuration ({error})") from error
    if theirs == MODEL_TYPE:
        raise CollabError(
            f"--hf-model {folder} was written by save_collaborative; give the folder of the original model and "
            "--key-dim, or go on from a checkpoint of fairseq"
        )
    if theirs != model_type:
        advice = f"give --arch {theirs}_collab" if theirs in FAMILIES else f"known are {', '.join(FAMILIES)}"
        raise CollabError(
            f"--hf-model {folder} holds a {theirs} model, and the architecture is for {model_type}: {advice}"
        )
    with quiet():
        config = import_transformers().AutoConfig.from_pretrained(folder, local_files_only=True)
    return json.dumps(json.loads(config.to_json_string(use_diff=False)))


def check_positions(model: nn.Module, where: str) -> None:
    """Refuses a model whose configuration wants positions that the installed transformers leaves out of the scores.

    Args:
        where: what to call the model's source.

    Raises:
        CollabError: it does, as transformers 5 does without a word.
    """
    kind = getattr(model.config, "position_embedding_type", None)
    if kind not in (None, "absolute") and not any(hasattr(one, "distance_embedding") for one in model.modules()):
        raise CollabError(
            f"{where} has {kind} position embeddings, which the installed transformers no longer computes; use "
            "transformers 4 without --key-dim, or another model"
        )


def _require_weights(folder: str) -> None:
    if not any(any(Path(folder).glob(pattern)) for pattern in WEIGHT_FILES):
        raise CollabError(
            f"--hf-model {folder} has a configuration but no weights ({', '.join(WEIGHT_FILES)}); give a folder "
            "that save_pretrained wrote"
        )


def _load(kind: str, folder: str, **options: Any) -> tuple[nn.Module, set[str]]:
    """The model of ``transformers.AutoModelFor<kind>`` in float32, and the names of what was not in the folder.

    Raises:
        CollabError: there are no weights, or they do not fit.
    """
    _require_weights(folder)
    loader = getattr(import_transformers(), f"AutoModelFor{kind}")
    try:
        with quiet():
            model, info = loader.from_pretrained(folder, local_files_only=True, output_loading_info=True, **options)
    except Exception as error:  # safetensors has one of its own, which is no subclass of a common one
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CollabError(f"--hf-model {folder}: the weights could not be loaded ({reason})") from error
    fresh = {key[0] if isinstance(key, tuple) else key for key in info["mismatched_keys"]} | set(info["missing_keys"])
    return model.float(), fresh


def load_masked_lm(folder: str, config: Any) -> tuple[nn.Module, bool]:
    """The model for masked language modelling with that configuration, and whether its head was in the folder.

    Raises:
        CollabError: there are no weights, or they are not those of such an encoder.
    """
    model, fresh = _load("MaskedLM", folder, config=config)
    check_positions(model, f"--hf-model {folder}")
    lost = sorted(key for key in fresh if key.startswith(model.base_model_prefix + "."))
    if lost:
        raise CollabError(
            f"--hf-model {folder}: {len(lost)} of the encoder's weights are not in its files, the first is {lost[0]}; "
            "give a folder whose config.json and weights belong together"
        )
    return model, not fresh


def load_head(folder: str, config: Any, num_classes: int) -> dict[str, Tensor]:
    """What a folder has for a classifier of so many classes: ``dense.*`` and ``out_proj.*``, either of them or none.

    The layer before the classifier is that of the pretrained model; the classifier counts only in a model for
    sequence classification.
    """
    family = FAMILIES[config.model_type]
    model, fresh = _load("SequenceClassification", folder, num_labels=num_classes, ignore_mismatched_sizes=True)
    classifies = any(str(name).endswith("ForSequenceClassification") for name in config.architectures or ())
    sources = {"dense": family.dense, "out_proj": "classifier"} if classifies else {"dense": family.dense}
    weights = model.state_dict()
    return {
        f"{ours}.{part}": weights[f"{theirs}.{part}"]
        for ours, theirs in sources.items()
        for part in ("weight", "bias")
        if f"{theirs}.{part}" not in fresh
    }


def fingerprint(dictionary: Any) -> str:
    """A short text that differs between dictionaries with other symbols or another order."""
    return hashlib.sha256("\n".join(dictionary.symbols).encode()).hexdigest()[:16]


def token_ids(dictionary: Any, folder: str, vocab_size: int) -> Tensor:
    """The id in a folder's vocabulary of every symbol of fairseq's dictionary, (len(dictionary),).

    fairseq's own symbols stand for those of the tokenizer: ``<s>`` and ``</s>`` for what begins and ends a sentence
    ([CLS] and [SEP]), ``<pad>``, ``<unk>`` and ``<mask>`` for its tokens of that kind. A ``madeupwordNNNN`` is the
    token with id NNNN, whose own name no dictionary of fairseq can hold. Those with which fairseq-preprocess fills a
    dictionary up occur in no text and count as unknown: their count is 0, or their number is the id of another symbol.

    Args:
        vocab_size: of the model's embeddings.

    Raises:
        CollabError: the folder has no tokenizer, or symbols of the dictionary are not in its vocabulary.
    """
    tokenizer = load_tokenizer(folder)
    vocabulary = tokenizer.get_vocab()
    special = {
        dictionary[dictionary.bos()]: tokenizer.cls_token or tokenizer.bos_token,
        dictionary[dictionary.pad()]: tokenizer.pad_token,
        dictionary[dictionary.eos()]: tokenizer.sep_token or tokenizer.eos_token,
        dictionary[dictionary.unk()]: tokenizer.unk_token,
        "<mask>": tokenizer.mask_token,
    }
    found: dict[str, int | None] = {
        symbol: vocabulary.get(special.get(symbol, symbol))
        for symbol in dictionary.symbols
        if not NAMED_BY_ID.fullmatch(symbol)
    }
    named = set(found.values())
    for index, symbol in enumerate(dictionary.symbols):
        if made_up := NAMED_BY_ID.fullmatch(symbol):
            number = int(made_up[1])
            fills_up = dictionary.count[index] == 0 or number in named
            found[symbol] = vocabulary.get(tokenizer.unk_token) if fills_up else number
    missing = [symbol for symbol, number in found.items() if number is None or number >= vocab_size]
    if missing:
        raise CollabError(
            f"{len(missing)} of the {len(dictionary)} symbols of the data's dictionary are not in the vocabulary of "
            f"--hf-model {folder}, the first is {missing[0]!r}: binarise the text with the tokenizer of that folder"
        )
    return torch.tensor([found[symbol] for symbol in dictionary.symbols])
