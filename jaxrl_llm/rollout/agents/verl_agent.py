"""Agent loops of verl: classes with a coroutine `run`, over a chat in place of verl's servers."""

import copy
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from jaxrl_llm.config.errors import ConfigError, RunError
from jaxrl_llm.config.functions import FunctionSpec, find_function, split_name
from jaxrl_llm.config.sections import AgentConfig
from jaxrl_llm.data.rows import row_name
from jaxrl_llm.models.inputs import Visual
from jaxrl_llm.rollout.agents.chat import BrokenEpisode, Chat, shown_parts
from jaxrl_llm.rollout.engine import SamplingParams
from jaxrl_llm.rollout.observation import EpisodeRow
from jaxrl_llm.rollout.tools.verl import Tree, as_attributes, entries, make_tool

KEY = "rollout.agent.loop"
SHOWN = 8  # tokens, in messages
LOOP_DEFAULTS = {
    "full_determinism": False,
    "multi_turn": {
        "format": "hermes",
        "max_user_turns": None,
        "max_tool_response_length": 256,
        "tool_response_truncate_side": "middle",
        "tool_config_path": None,
    },
}
"""What verl has for the keys of `actor_rollout_ref.rollout` that its own loops read."""


async def verl_agent_loop(
    chat: Chat,
    row: EpisodeRow,
    *,
    loop: str,
    config: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    agent_name: str = "",
) -> None:
    """Let an agent loop of verl lead an episode.

    What it asks its `server_manager` to go on from must be the stream of tokens so far with what
    is told behind it, and what it returns must be that stream with its mask; told tokens after the
    last turn may follow, and are left out. Else the episode is broken. The loop writes the prompt
    itself. Its `reward_score`, if there is one, is the episode's score; log-probs are the engine's.

    Args:
        chat: of the episode.
        row: passed to `run` with verl's names.
        loop: a class like verl's `AgentLoopBase`, as `pkg.mod.Class` or `my_file.py:Class`.
        config: keys of verl's config that the loop reads, such as
            `{actor_rollout_ref: {rollout: {multi_turn: {tool_config_path: tools.yaml}}}}`; lengths
            and numbers of turns are the run's where they are not given.
        options: further keywords of the class, such as `hf_model_type`.
        agent_name: by which rows of the data name it; the class's name is taken, too.

    Raises:
        RunError: there is no such class.
        BrokenEpisode: the loop does not only add tokens, or samples otherwise than the run.
    """
    try:
        loop_class = find_function(FunctionSpec(loop), "", key=KEY)
        tree = loop_config(chat, config or {})
        tools = load_loop_tools(tree.actor_rollout_ref.rollout.multi_turn.tool_config_path)
    except ConfigError as error:
        raise RunError(str(error)) from error
    given = {"hf_model_type": None, "tools": SimpleNamespace(tools=list(tools)), **(options or {})}
    sees = chat.contents.processor is not None
    agent_loop = loop_class(
        trainer_config=SimpleNamespace(config=tree),
        server_manager=ChatServer(chat),
        tokenizer=chat.tokenizer,
        processor=LoopProcessor(chat) if sees else None,
        dataset_cls=LoopDataset if sees else None,
        data_config=SimpleNamespace(config=tree.data),
        **given,
    )
    messages = chat.contents.with_pictures(
        copy.deepcopy(chat.prompt.messages), lambda image: {"type": "image", "image": image}
    )
    row = replace(row, messages=messages)
    fields = row_fields(row, agent_name or split_name(loop)[1])
    output = await agent_loop.run(asked_sampling(chat.sampling), **fields)
    check_output(chat, output)
    if output.reward_score is not None:
        chat.score = output.reward_score


def loop_config(chat: Chat, config: Mapping[str, Any]) -> Tree:
    """Return what a loop reads as verl's config."""
    limits = chat.limits
    rollout = merged_settings(
        asked_sampling(chat.sampling) | LOOP_DEFAULTS,
        {
            "prompt_length": limits.prompt_tokens,
            "response_length": limits.new_tokens,
            "multi_turn": {
                "max_assistant_turns": limits.turns,
                "max_parallel_calls": limits.parallel_calls,
            },
        },
    )
    return as_attributes(
        merged_settings({"actor_rollout_ref": {"rollout": rollout}, "data": {}}, config)
    )


def merged_settings(tree: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tree with the values of another one in place of its own.

    >>> merged_settings({"a": {"b": 1, "c": 2}}, {"a": {"c": 3}})
    {'a': {'b': 1, 'c': 3}}
    """
    both = {key: value for key, value in tree.items() if isinstance(value, Mapping)}
    return {**tree, **other} | {
        key: merged_settings(value, other[key])
        for key, value in both.items()
        if isinstance(other.get(key), Mapping)
    }


@functools.cache
def load_loop_tools(path: str | None) -> tuple[Any, ...]:
    """Return the tools of a file of verl's, which the episodes of a process share.

    Raises:
        ConfigError: the file does not fit.
    """
    return tuple(make_tool(entry, path) for entry in entries(path)) if path else ()


def row_fields(row: EpisodeRow, agent_name: str) -> dict[str, Any]:
    """Return a row by the names that verl passes it to a loop."""
    extra = copy.deepcopy(row.extra_info)
    return {
        "raw_prompt": list(row.messages),
        "data_source": row.data_source,
        "reward_model": {"style": "rule", "ground_truth": row.ground_truth},
        "extra_info": extra,
        "tools_kwargs": extra.get("tools_kwargs") or {},
        "interaction_kwargs": extra.get("interaction_kwargs") or {},
        "agent_name": agent_name,
        "index": extra.get("index", row.index),
    }


def asked_sampling(sampling: SamplingParams) -> dict[str, Any]:
    """Return how the run samples, by verl's names.

    >>> asked_sampling(SamplingParams(8))["top_k"]
    -1
    """
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "repetition_penalty": sampling.repetition_penalty,
        "logprobs": True,
    }


class ChatServer:
    """What stands for verl's server of an engine: the chat of one episode.

    Args:
        chat: draws the turns.
    """

    def __init__(self, chat: Chat) -> None:
        self._chat, self._read = chat, dict[int, tuple[Any, Visual]]()

    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        image_data: Sequence[Any] | None = None,
        **media: Any,
    ) -> SimpleNamespace:
        """Draw a turn after these tokens, and return it as verl's servers do.

        Args:
            request_id: as verl has it; of no use here.
            prompt_ids: the stream so far, and what is told.
            sampling_params: as `run` got them; `max_tokens` and `stop` may be added.
            image_data: images of all these tokens, which have a placeholder for each token of one,
                in any form of `data.visuals.pictures.read_picture` but that of a path.
            **media: videos and the like must be None.

        Raises:
            BrokenEpisode: the tokens don't go on from the stream, or it is to be sampled otherwise.
            EpisodeEnd: a limit is reached.
        """
        if given := [n for n, data in media.items() if n.endswith("_data") and data]:
            raise BrokenEpisode(f"server_manager.generate: got {given[0]}, expected images alone")
        own = asked_sampling(self._chat.sampling) | {"n": 1}
        asked = {n: value for n, value in sampling_params.items() if value is not None}
        limits = [asked.pop(n) for n in ("max_tokens", "max_new_tokens") if n in asked]
        stop = asked.pop("stop", ())
        if not set(asked.pop("stop_token_ids", ())) <= set(self._chat.sampling.stop_ids):
            raise BrokenEpisode(
                "server_manager.generate: got further stop_token_ids, expected some of "
                f"{self._chat.sampling.stop_ids}"
            )
        for name, value in asked.items():
            if name != "logprobs" and own.get(name) != value:
                raise BrokenEpisode(
                    f"server_manager.generate: got {name}={value}, expected "
                    f"{own.get(name, 'none')}, by which the run samples"
                )
        completion = await self._chat.generate_after(
            prompt_ids,
            visuals=tuple(map(self._visual, image_data or ())),
            max_tokens=min(limits, default=None),
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
        )
        return SimpleNamespace(
            token_ids=completion.tokens.tolist(),
            log_probs=completion.logprobs.tolist(),
            stop_reason="completed",
            routed_experts=None,
            num_preempted=0,
            extra_fields={},
        )

    def _visual(self, image: Any) -> Visual:
        """Return an image, which is read once though each turn brings it again."""
        if id(image) not in self._read:
            self._read[id(image)] = image, self._chat.contents.read("image", image)
        return self._read[id(image)][1]


class LoopProcessor:
    """What stands for the processor of a model that sees, of `transformers`, where loops use it.

    Args:
        chat: of the episode.
    """

    def __init__(self, chat: Chat) -> None:
        self.tokenizer, self._contents = chat.tokenizer, chat.contents
        assert self._contents.processor is not None, "the policy reads images"
        patch = self._contents.processor.resizing.patch
        self.image_processor = SimpleNamespace(patch_size=patch)

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Any:
        """Return the text of a chat, with a placeholder for each image."""
        return self.tokenizer.apply_chat_template(messages, **{"tokenize": False, **options})

    def __call__(
        self,
        text: Sequence[str],
        images: Sequence[Any] | None = None,
        videos: Sequence[Any] | None = None,
        **_: Any,
    ) -> dict[str, Any]:
        """Return the tokens of one text, with those of its images, as `input_ids` [1 T] of numpy.

        Args:
            text: one.
            images: of the text.
            videos: none.
            **_: of `transformers`, of no use here.

        Raises:
            BrokenEpisode: there are videos, or other placeholders than images.
        """
        if videos:
            raise BrokenEpisode(f"processor: got {len(videos)} videos, expected images alone")
        (only,) = text
        ids = self.tokenizer(only, add_special_tokens=False)["input_ids"]
        visuals = [self._contents.read("image", image) for image in images or ()]
        expanded = self._contents.expand(ids, visuals)
        return {"input_ids": np.array([expanded]), "attention_mask": np.ones((1, len(expanded)))}


class LoopDataset:
    """What stands for verl's class of data sets, of which loops ask for the images of messages."""

    @staticmethod
    def process_vision_info(
        messages: Sequence[Mapping[str, Any]], *_: Any, **__: Any
    ) -> tuple[list[Any] | None, None]:
        """Return the images that messages hold, and no videos.

        >>> LoopDataset.process_vision_info([{"content": [{"type": "image", "image": 1}]}])
        ([1], None)
        """
        return [part["image"] for part in shown_parts(messages)] or None, None


def check_output(chat: Chat, output: Any) -> None:
    """Check that a loop returns the stream that was drawn and told.

    Raises:
        BrokenEpisode: it does not.
    """
    if not chat.turn:
        return
    episode = chat.episode(0.0)
    ids, mask = list(output.response_ids), [int(drawn) for drawn in output.response_mask]
    if len(ids) != len(mask):
        raise BrokenEpisode(
            f"the agent loop returned {len(ids)} response_ids and {len(mask)} in response_mask, "
            "expected as many"
        )
    got = list(zip(ids, mask, strict=True))
    while got and not got[-1][1]:
        got.pop()
    own = list(zip(episode.tokens.tolist(), map(int, episode.drawn), strict=True))
    _check_same("prompt_ids", [(t, 0) for t in output.prompt_ids], [(t, 0) for t in episode.prompt])
    _check_same("response_ids", got, own)


def _check_same(what: str, got: list[tuple[int, int]], own: list[tuple[int, int]]) -> None:
    if got == own:
        return
    pairs = enumerate(zip(got, own, strict=False))
    same = next((i for i, (a, b) in pairs if a != b), min(len(got), len(own)))
    raise BrokenEpisode(
        f"the agent loop returned other {what} (and masks) than were drawn and told: from place "
        f"{same} on {got[same : same + SHOWN]}, expected {own[same : same + SHOWN]}"
    )


VERL_AGENTS = {"one_answer": "single_turn_agent", "with_tools": "tool_agent"}
"""Our agents by the names of verl's that do the same."""


def check_agent_rows(config: AgentConfig, rows: Iterable[Mapping[str, Any]], key: str) -> None:
    """Refuse rows whose `agent_name` is not that of the agent that leads their episodes.

    Args:
        config: of episodes.
        rows: of the data.
        key: of the config that names the files, for messages.

    Raises:
        ConfigError: a row asks for another agent.

    >>> check_agent_rows(AgentConfig(), [{}, {"agent_name": "single_turn_agent"}], "data")
    >>> check_agent_rows(AgentConfig(), [{"agent_name": "tool_agent"}], "data")
    Traceback (most recent call last):
    jaxrl_llm.config.errors.ConfigError: data: dataset row 0: got agent_name 'tool_agent', \
which is verl's name for with_tools; expected one_answer or single_turn_agent, as rollout.agent is
    """
    names = agent_names(config)
    for number, row in enumerate(rows):
        name = row.get("agent_name")
        if name is not None and name not in names:
            ours = {theirs: ours for ours, theirs in VERL_AGENTS.items()}.get(name)
            hint = f", which is verl's name for {ours}" if ours else ""
            raise ConfigError(
                f"{key}: {row_name(number, row)}: got agent_name {name!r}{hint}; expected "
                f"{' or '.join(names)}, as rollout.agent is"
            )


def agent_names(config: AgentConfig) -> list[str]:
    """Return the names by which rows may name the agent of a config.

    >>> agent_names(AgentConfig(tools=["calculator"]))
    ['with_tools', 'tool_agent']
    """
    default = "with_environment" if config.environment else "with_tools"
    spec = config.agent or FunctionSpec(default if config.has_episodes else "one_answer")
    name = split_name(spec.fn)[1]
    names = [name, VERL_AGENTS.get(name)]
    if name == "verl_agent_loop":
        names += [spec.kwargs.get("agent_name"), split_name(spec.kwargs.get("loop", ""))[1]]
    return [name for name in names if name]
