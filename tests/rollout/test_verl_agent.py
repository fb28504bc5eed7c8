"""Agent loops of verl over a chat: what they ask for, what they return, and rows that name them."""

import pytest

from jaxrl_llm.config.errors import ConfigError, RunError
from jaxrl_llm.config.functions import FunctionSpec
from jaxrl_llm.config.sections import AgentConfig
from jaxrl_llm.rollout.agents.chat import BrokenEpisode
from jaxrl_llm.rollout.agents.verl_agent import check_agent_rows
from tests.episodes import STOPS, TOKENIZER, Scripted, ids, picture, play, prompt

LOOPS = '''
from types import SimpleNamespace


class Loop:
    """As verl's AgentLoopBase, and derived from nothing: asks twice, and says `more` in between."""

    def __init__(self, trainer_config, server_manager, tokenizer, processor, **kwargs):
        self.config, self.server_manager = trainer_config.config, server_manager
        self.tokenizer, self.kwargs = tokenizer, kwargs
        self.rollout_config = self.config.actor_rollout_ref.rollout

    def encode(self, messages):
        rendered = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        return self.tokenizer(rendered, add_special_tokens=False)["input_ids"]

    def sampling(self, params):
        return params

    def told(self):
        return self.encode([{"role": "user", "content": "more"}])

    def rewritten(self, tokens):
        return tokens

    async def run(self, sampling_params, **row):
        self.row, self.params = row, sampling_params
        prompt = self.encode(row["raw_prompt"])
        tokens, mask = list(prompt), []
        for turn in range(self.kwargs.get("asks", 2)):
            if turn:
                tokens = self.rewritten(tokens + self.told())
                mask += [0] * len(self.told())
            output = await self.server_manager.generate(
                request_id="x", prompt_ids=tokens, sampling_params=self.sampling(sampling_params)
            )
            assert len(output.token_ids) == len(output.log_probs)
            tokens, mask = tokens + output.token_ids, mask + [1] * len(output.token_ids)
        return self.output(prompt, tokens[len(prompt) :], mask)

    def output(self, prompt, tokens, mask):
        return SimpleNamespace(
            prompt_ids=prompt, response_ids=tokens, response_mask=mask, reward_score=0.5
        )


class Reads(Loop):
    """Reads a row and a config by verl's names."""

    def output(self, prompt, tokens, mask):
        assert self.row["reward_model"]["ground_truth"] == "7" and self.row["data_source"] == "test"
        assert self.row["tools_kwargs"] == {"t": {"create_kwargs": {"x": 1}}}
        assert (self.row["index"], self.row["agent_name"]) == (5, "Reads")
        assert self.rollout_config.response_length == 60 and self.rollout_config.prompt_length == 40
        assert self.rollout_config.multi_turn.max_assistant_turns == 3
        assert self.rollout_config.multi_turn.format == "mine"
        assert self.config.data.get("apply_chat_template_kwargs", {}) == {"a": 1}
        assert self.kwargs["hf_model_type"] == "qwen3" and self.kwargs["tools"].tools == []
        assert self.params["temperature"] == 1.0 and self.params["top_k"] == -1
        return super().output(prompt, tokens, mask)


class OwnPrompt(Loop):
    """Puts a message of its own before the row's."""

    def encode(self, messages):
        own = [{"role": "user", "content": "hi"}] if len(messages) == 1 else []
        return super().encode(own + messages)

    def told(self):
        return Loop.encode(self, [{"role": "user", "content": "more"}])


class Rewrites(Loop):
    def rewritten(self, tokens):
        return tokens[:3] + self.tokenizer("z")["input_ids"][:1] + tokens[4:]


class Forgets(Loop):
    def rewritten(self, tokens):
        return tokens[:4]


class HidesATurn(Loop):
    def output(self, prompt, tokens, mask):
        return super().output(prompt, tokens, [0] * 3 + mask[3:])


class OtherTokens(Loop):
    def output(self, prompt, tokens, mask):
        return super().output(prompt, tokens[:-1] + [1], mask)


class OtherPrompt(Loop):
    def output(self, prompt, tokens, mask):
        return super().output(prompt[:-1], tokens, mask)


class Uneven(Loop):
    def output(self, prompt, tokens, mask):
        return super().output(prompt, tokens, mask[:-1])


class ToldLast(Loop):
    def output(self, prompt, tokens, mask):
        return super().output(prompt, tokens + self.told(), mask + [0] * len(self.told()))


class Hotter(Loop):
    def sampling(self, params):
        return {**params, "temperature": 2.0}


class Stops(Loop):
    def sampling(self, params):
        return {**params, "stop_token_ids": [3]}


class Short(Loop):
    def sampling(self, params):
        return {**params, "max_tokens": 2, "stop": ["q"]}


class Images(Loop):
    async def run(self, sampling_params, **row):
        prompt = self.encode(row["raw_prompt"])
        await self.server_manager.generate(
            "x", prompt_ids=prompt, sampling_params=sampling_params, image_data=[1], video_data=None
        )


class Scoreless(Loop):
    def output(self, prompt, tokens, mask):
        output = super().output(prompt, tokens, mask)
        output.reward_score = None
        return output
'''


@pytest.fixture
def run(tmp_path):
    """(name of a loop, keys) -> the episode that it leads."""
    (tmp_path / "loops.py").write_text(LOOPS)

    def episode(name, *, text="x", info=None, limits=None, tokens=60, **kwargs):
        agent = FunctionSpec(
            "verl_agent_loop", {"loop": f"{tmp_path / 'loops.py'}:{name}", **kwargs}
        )
        engine = Scripted(lambda text, seed: "ab")
        limits = {"broken_share": 1.0, **(limits or {})}
        prompts = [prompt(text, **(info or {}))]
        (one,) = play(engine, prompts, agent=agent, limits=limits, tokens=tokens).episodes
        return one

    return episode


MORE = "<<|user|>more<|end|><|assistant|>>"


def test_a_loop_leads_an_episode_by_tokens(run):
    episode = run("Loop")
    assert picture(episode) == ["ab<|end|>", MORE, "ab<|end|>"]
    assert episode.prompt == prompt("x").tokens and episode.stopped_by == STOPS[0]
    assert (episode.score, episode.finish, episode.turns) == (0.5, "stop", 2)
    assert (episode.logprobs[episode.drawn] < 0).all()
    assert [m["role"] for m in episode.messages] == ["user", "assistant", "user", "assistant"]
    assert run("Scoreless").score is None


def test_a_loop_gets_what_verl_gives_it(run):
    info = {"index": 5, "tools_kwargs": {"t": {"create_kwargs": {"x": 1}}}}
    config = {
        "actor_rollout_ref": {"rollout": {"multi_turn": {"format": "mine"}}},
        "data": {"apply_chat_template_kwargs": {"a": 1}},
    }
    options = {"hf_model_type": "qwen3"}
    episode = run("Reads", info=info, limits={"turns": 3}, config=config, options=options)
    assert episode.error is None


def test_a_loop_writes_its_own_prompt_within_the_limit(run):
    episode = run("OwnPrompt")
    assert TOKENIZER.decode(episode.prompt).startswith("<|user|>hi<|end|><|user|>x")
    assert "as the agent wrote it, expected at most 40" in refused(run, "OwnPrompt", text="x" * 34)


def refused(run, name, **kwargs):
    """Return why a run of one episode was given up."""
    with pytest.raises(RunError) as raised:
        run(name, **kwargs)
    return str(raised.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Rewrites", "differ from the stream of 7 from token 3 on: 'z"),
        ("Forgets", "got 4 tokens that differ from the stream of 7 from token 4 on"),
        ("HidesATurn", "other response_ids (and masks) than were drawn and told: from place 0 on"),
        ("OtherTokens", "than were drawn and told: from place 12 on [(1, 1)], expected"),
        ("OtherPrompt", "other prompt_ids"),
        ("Uneven", "expected as many"),
        ("Hotter", "temperature=2.0, expected 1.0, by which the run samples"),
        ("Stops", "further stop_token_ids"),
        ("Images", "reads text alone: set model.vision"),
        ("Missing", "no function 'Missing'"),
    ],
)
def test_what_is_no_stream_of_the_episode_is_refused(run, name, message):
    assert message in refused(run, name)


def test_what_is_told_after_the_last_turn_is_left_out(run):
    assert picture(run("ToldLast")) == picture(run("Loop"))


def test_a_turn_may_be_shorter_than_the_run_allows(run):
    assert picture(run("Short"))[0] == "ab"


@pytest.mark.parametrize(
    ("keys", "finish"), [({"limits": {"turns": 1}}, "turns"), ({"tokens": 8}, "length")]
)
def test_limits_end_a_loop(run, keys, finish):
    episode = run("Loop", **keys)
    assert (episode.finish, episode.turns, episode.usable) == (finish, 1, True)


def test_a_chat_tells_no_messages_where_tokens_are_told():
    async def mixes(chat):
        await chat.generate()
        chat.append("more")
        with pytest.raises(BrokenEpisode, match="got 1 appended messages"):
            await chat.generate_after([*chat.tokens, *ids("z")])
        await chat.generate()
        completion = await chat.generate_after(chat.tokens)  # goes on, and nothing is told
        assert completion.tokens.tolist() == [*ids("a"), STOPS[0]]

    (episode,) = play(Scripted(lambda text, seed: "a"), [prompt("x")], agent=mixes).episodes
    assert (episode.turns, len(episode.pieces), episode.error) == (3, 4, None)


@pytest.mark.parametrize(
    ("agent", "names"),
    [
        ({}, ["one_answer", "single_turn_agent", None]),
        ({"tools": ["calculator"]}, ["with_tools", "tool_agent"]),
        ({"environment": "grid"}, ["with_environment"]),
        ({"agent": FunctionSpec("mine.py:plans")}, ["plans"]),
        (
            {
                "agent": FunctionSpec(
                    "verl_agent_loop", {"loop": "pkg.loops.Mine", "agent_name": "my_loop"}
                )
            },
            ["verl_agent_loop", "Mine", "my_loop"],
        ),
    ],
)
def test_a_row_names_the_agent_of_the_config_or_none(agent, names):
    rows = [{"agent_name": name} for name in names]
    check_agent_rows(AgentConfig(**agent), [*rows, {}], "data")
    every = {"one_answer", "single_turn_agent", "tool_agent", "with_tools", "other"}
    for name in every - set(names):
        with pytest.raises(ConfigError, match=f"row {len(rows)}: got agent_name '{name}'"):
            check_agent_rows(AgentConfig(**agent), [*rows, {"agent_name": name}], "data")
