"""Keys of `config.json` that mean the same in every family, and how they are checked."""

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

Config: TypeAlias = Mapping[str, Any]

ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
# Keys that transformers reads, and that do not change what a model computes for given tokens and
# weights. What it does not read is found by `models.hf.unread`.
WITHOUT_EFFECT = {
    "architectures",
    "model_type",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    "pretraining_tp",
    "attn_implementation",
    "cache_implementation",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "sep_token_id",
    "decoder_start_token_id",
    "problem_type",
    "num_labels",
    "id2label",
    "label2id",
    "classifier_dropout",
    "token_classification_bias",
    "return_dict",
    "output_attentions",
    "output_hidden_states",
    "chunk_size_feed_forward",
    # how to generate, which transformers 4 wrote here too
    "do_sample",
    "max_length",
    "temperature",
    "top_k",
    "top_p",
}


def check_whole(config: Config, keys: Iterable[str]) -> None:
    """Refuse keys that are no whole numbers; specs say which of these they can have.

    >>> check_whole({"head_dim": "8"}, ["head_dim"])
    Traceback (most recent call last):
    ValueError: {'head_dim': '8'}: expected whole numbers
    """
    given = {key: config.get(key) for key in sorted(keys)}
    if wrong := {key: value for key, value in given.items() if type(value) is not int}:
        raise ValueError(f"{wrong}: expected whole numbers")
