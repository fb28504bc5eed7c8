"""What kinds of layers transformers takes where a config does not say, in several families."""

from jaxrl_llm.models.hf.family import FULL, SLIDING
from jaxrl_llm.models.hf.keys import Config

QWEN_LAYERS = {"use_sliding_window": False, "sliding_window": 4096}


def all_full(config: Config) -> list[str]:
    """Return that all layers attend to everything.

    >>> all_full({"num_hidden_layers": 2})
    ['full_attention', 'full_attention']
    """
    return [FULL] * config["num_hidden_layers"]


def last_slide(config: Config) -> list[str]:
    """Return that the layers from `max_window_layers` on have the window, if any has (Qwen 2).

    >>> keys = {"num_hidden_layers": 2, "max_window_layers": 1, "sliding_window": 8}
    >>> last_slide(keys | {"use_sliding_window": True})
    ['full_attention', 'sliding_attention']
    """
    slides = config["use_sliding_window"] and config["sliding_window"] is not None
    first = config["max_window_layers"] if slides else config["num_hidden_layers"]
    return [SLIDING if i >= first else FULL for i in range(config["num_hidden_layers"])]
