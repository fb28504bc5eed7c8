"""What a run on preferences reads: its loss, and its rows, checked against each other."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxrl_llm.config import functions
from jaxrl_llm.config.errors import ConfigError, config_errors_at
from jaxrl_llm.config.fields import asks_for, check_fields
from jaxrl_llm.config.functions import load_function
from jaxrl_llm.config.programs import PreferConfig
from jaxrl_llm.data.chat import load_tokenizer
from jaxrl_llm.data.preference_rows import normalize_preference_row
from jaxrl_llm.data.preferences import Preference, tokenize_preferences
from jaxrl_llm.data.rows import Row, load_rows
from jaxrl_llm.monitoring.activity import activity
from jaxrl_llm.runs.together import check_same_data
from jaxrl_llm.training.preference_objective import ANSWER_FIELDS, OF_LABELLED, OF_ROWS, SCORES
from jaxrl_llm.training.step_objective import LOGITS, OF_STEPS

PAIRS, LABELLED, STEPS = "pairs", "answers with a label", "answers with labelled steps"


@dataclass(frozen=True, kw_only=True)
class PreferenceData:
    """The tokenized rows of a run.

    Attributes:
        train: to learn from.
        validation: held out; may be empty.
        width: tokens of the longest row, two answers with their prompts for a pair.
        max_tokens: of one answer with its prompt.
    """

    train: list[Preference]
    validation: list[Preference]
    width: int
    max_tokens: int


def load_preference_loss(config: PreferConfig) -> Callable[..., Any]:
    """Return the loss that a config names.

    Raises:
        ConfigError: there is no such function, or it asks for a field that there is not.
    """
    loss = load_function(config.loss, functions.PREFERENCES, passed=None, key="loss")
    check_fields(loss, "loss", available=ANSWER_FIELDS | OF_STEPS)
    names = set(asks_for(loss))
    kinds_of = {PAIRS: ANSWER_FIELDS - OF_LABELLED, LABELLED: OF_LABELLED, STEPS: OF_STEPS}
    asked = [
        f"{sorted(names & fields)} of {kind}" for kind, fields in kinds_of.items() if names & fields
    ]
    if len(asked) > 1:
        raise ConfigError(
            f"loss: {config.loss.fn} asks for {' and for '.join(asked)}; a run has one kind"
        )
    if names & (SCORES | {LOGITS}) and (config.model.lora or config.model.adapter):
        raise ConfigError(
            f"loss: {config.loss.fn} trains a reward model, whose head an adapter can't hold: "
            "remove model.lora and model.adapter"
        )
    return loss


@activity("reading the data")
def read_preference_rows(config: PreferConfig) -> tuple[Sequence[Row], Sequence[Row]]:
    """Read the rows of a run, to train and to validate on.

    Raises:
        ConfigError: they can't be read.
    """

    def read(key: str, paths: Sequence[str]) -> Sequence[Row]:
        with config_errors_at(key):
            return load_rows(config.data.dataset, paths, normalize=normalize_preference_row)

    held_out = config.data.validation
    return (
        read("data.train", config.data.train),
        read("data.validation", held_out) if held_out else [],
    )


@activity("tokenizing the answers")
def tokenize_preference_rows(
    config: PreferConfig,
    loss: Callable[..., Any],
    rows: tuple[Sequence[Row], Sequence[Row]],
    vocab_size: int,
) -> PreferenceData:
    """Tokenize the rows of a run.

    Args:
        config: of the run.
        loss: that it names.
        rows: to train and to validate on.
        vocab_size: of the model.

    Raises:
        ConfigError: they don't fit, or the loss asks for what they have not.
    """
    with config_errors_at("model.path"):
        tokenizer = load_tokenizer(config.model.path)

    def tokenized(key: str, rows: Sequence[Row]) -> list[Preference]:
        with config_errors_at(key):
            items, _ = tokenize_preferences(
                rows,
                tokenizer,
                max_tokens=config.data.max_tokens,
                filter_overlong=config.data.filter_overlong,
                template_kwargs=config.data.chat_template_kwargs,
                step_separator=config.data.step_separator,
                vocab_size=vocab_size,
            )
        check_same_data(key, (item.tokens for item in items))
        check_rows(items[0], loss, f"{key}: loss {config.loss.fn!r}")
        return items

    train = tokenized("data.train", rows[0])
    held_out = tokenized("data.validation", rows[1]) if config.data.validation else []
    count = 2 if train[0].is_pair else 1
    most = config.data.max_tokens
    return PreferenceData(train=train, validation=held_out, width=count * most, max_tokens=most)


def check_rows(item: Preference, loss: Callable[..., Any], where: str) -> None:
    """Raise ConfigError unless rows like this one have what a loss asks for."""
    names = set(asks_for(loss))
    expected = STEPS if names & OF_STEPS else PAIRS if names - OF_LABELLED else LABELLED
    got = STEPS if item.step_ends else PAIRS if item.is_pair else LABELLED
    if got != expected:
        raise ConfigError(f"{where} is of {expected}, but the rows are {got}")
    for name in sorted(names & OF_ROWS - set(item.columns)):
        raise ConfigError(f"{where} asks for {name!r}, but the rows have no such column")
