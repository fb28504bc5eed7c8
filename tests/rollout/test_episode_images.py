import contextlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from jaxrl_llm.config.errors import RunError
from jaxrl_llm.config.functions import FunctionSpec
from jaxrl_llm.data.chat import encode_prompt, load_tokenizer, stop_ids
from jaxrl_llm.data.dataset import Prompt
from jaxrl_llm.data.visuals.processor import VisualProcessor
from jaxrl_llm.rollout.agents.sampler import EpisodeSampler
from jaxrl_llm.rollout.engine import Completion, SamplingParams
from jaxrl_llm.rollout.observation import Observation
from jaxrl_llm.rollout.rollouts import lay_out
from jaxrl_llm.rollout.tools import tool
from jaxrl_llm.rollout.tools.verl import response_content
from jaxrl_llm.types import VISUALS
from tests import episodes

PROGRAMS = Path(__file__).with_name("programs_of_tests.py")
MODEL = Path(__file__).parents[2] / "configs" / "vision" / "model"
TOKENIZER = load_tokenizer(MODEL)
STOPS = stop_ids(TOKENIZER, MODEL)
PROCESSOR = VisualProcessor.from_directory(MODEL)
IMAGE = PROCESSOR.placeholders.image_id


def drawn(side, color=200):
    """Return a square image of a color."""
    return Image.new("RGB", (side, side), (color, 20, 30))


def chart(side: int) -> Observation:
    """Show a chart.\n\nArgs:\n    side: of it, in pixels."""
    return Observation(["seen: ", drawn(side), "done"], reward=0.5)


class Scripted(episodes.Scripted):
    """An engine that answers with what a function makes of the text so far, and a stop token."""

    def answer(self, request):
        self.batches.append(request)
        text = self.respond(TOKENIZER.decode(request.prompt))
        tokens = [*TOKENIZER(text, add_special_tokens=False)["input_ids"], STOPS[0]]
        zeros = np.zeros(len(tokens), np.int32)
        return Completion(np.array(tokens, np.int32), zeros - 1.0, zeros, "stop", STOPS[0])


def play(respond, prompts=None, *, tokens=120, visual_tokens=None, processor=PROCESSOR, **keys):
    """Sample an episode for each prompt; return the episodes, and the engine's requests."""
    engine, sampling = Scripted(respond), SamplingParams(max_new_tokens=tokens, stop_ids=STOPS)
    made = episodes.config(order="free", call_format="pythonic", **keys)
    options = {"template_kwargs": {}, "processor": processor, "visual_tokens": visual_tokens}
    with contextlib.closing(
        EpisodeSampler(made, TOKENIZER, STOPS, prompt_tokens=60, **options)
    ) as sampler:
        prompts = prompts or [asks("show")]
        return sampler.sample(engine, prompts, sampling, samples=1, seed=(0, 1)), engine.batches


def asks(text, *visuals, **extra_info):
    """Return a prompt whose message shows images, and then says a text."""
    parts = [*({"type": "image"} for _ in visuals), {"type": "text", "text": text}]
    messages = [{"role": "user", "content": parts}]
    ids = PROCESSOR.placeholders.expand(encode_prompt(TOKENIZER, messages), visuals, TOKENIZER)
    return Prompt(0, tuple(ids), extra_info=extra_info, messages=messages, visuals=visuals)


def asks_for(*sides):
    """Call `chart` once a turn, and then say `ok`."""

    def respond(text):
        turn = text.count("<|assistant|>") - 1
        return f"[chart(side={sides[turn]})]" if turn < len(sides) else "ok"

    return respond


def test_the_stream_holds_the_tokens_of_an_image_and_later_requests_hold_it():
    first = PROCESSOR.image(drawn(32, 90))
    played, requests = play(asks_for(32, 48), [asks("show", first)], tools=[chart])
    (episode,) = played.episodes
    assert episode.prompt_visuals == (first,) and episode.rewards == (0.5, 0.5, 0.0)
    told = [piece for piece in episode.pieces if not piece.drawn]
    pads = "<|image_pad|>"
    for piece, count in zip(told, (4, 9), strict=True):
        text = TOKENIZER.decode(piece.tokens)
        assert f"seen: <|vision_start|>{pads * count}<|vision_end|>done<|end|>" in text
        assert [visual.tokens for visual in piece.visuals] == [count]
    keys = [visual.key for visual in episode.visuals]
    assert keys == [first.key, *(PROCESSOR.image(drawn(side)).key for side in (32, 48))]
    for number, request in enumerate(requests, 1):
        assert [visual.key for visual in request.visuals] == keys[:number]
        assert request.prompt.count(IMAGE) == sum(visual.tokens for visual in request.visuals)
    batch = lay_out(played, samples=1, max_tokens=256)
    assert [visual.key for visual in batch[VISUALS][0]] == keys
    assert not batch["mask"][0][batch.tokens[0] == IMAGE].any()
    shown = episode.messages[2]["content"]
    assert shown[1] == {"type": "image", "key": keys[1].hex()}


def looks_around():
    """Show a room first, and then another one."""
    answer = yield Observation([drawn(16), "You wake up."])
    answer = yield Observation(np.full((32, 16, 3), len(answer), np.uint8))
    return 1.0


def test_an_environment_shows_an_image_first_and_an_array_after_it():
    played, _ = play(lambda text: "ok", environment=looks_around)
    (episode,) = played.episodes
    assert [v.tokens for v in episode.prompt_visuals] == [1]
    assert [v.tokens for piece in episode.pieces for v in piece.visuals] == [2]
    assert episode.prompt.count(IMAGE) == 1 and episode.score == 1.0
    pixels = PROCESSOR.pixels(episode.visuals[1])
    np.testing.assert_array_equal(pixels, np.full((1, 32, 16, 3), len("ok")))


def test_an_image_that_does_not_fit_ends_the_episode_and_is_never_cut():
    whole = play(asks_for(48), tools=[chart])[0].episodes[0]
    for room in (len(whole.tokens) - 4, len(whole.tokens) - 10):
        (episode,) = play(asks_for(48), tools=[chart], tokens=room)[0].episodes
        pads = (episode.tokens == IMAGE).sum()
        assert pads == sum(v.tokens for v in episode.visuals) and pads in (0, 9)
        assert episode.finish == "length" or pads
    first = PROCESSOR.image(drawn(32, 90))
    for most, told in ((17, [4, 9]), (16, [4]), (8, [4]), (7, [])):  # in a row
        keys = {"tools": [chart], "visual_tokens": most}
        (episode,) = play(asks_for(32, 48), [asks("show", first)], **keys)[0].episodes
        assert [v.tokens for piece in episode.pieces for v in piece.visuals] == told
        assert episode.finish == ("stop" if most == 17 else "length") and episode.usable
        assert (episode.tokens == IMAGE).sum() == sum(told)
    with pytest.raises(RunError, match="images"):
        play(lambda text: "ok", environment=looks_around, visual_tokens=0)


def text_file(side: int) -> bytes:
    """Return what is no image.\n\nArgs:\n    side: of nothing."""
    return b"no image"


def test_images_that_can_t_be_told_are_the_environment_s_fault():
    for given, keys, word in (
        (chart, {"limits": {"observation_tokens": 8}}, "tokens"),
        (chart, {"processor": None}, "model.vision"),
        (text_file, {}, "image"),
    ):
        with pytest.raises(RunError, match=word):
            play(lambda _, name=given.__name__: f"[{name}(side=48)]", tools=[given], **keys)


def test_a_program_gets_the_row_s_images_and_shows_them_again():
    pytest.importorskip("openai")
    first = PROCESSOR.image(drawn(48, 90).resize((32, 48)))
    program = FunctionSpec("openai_program", {"run": f"{PROGRAMS}:main"})
    played, requests = play(lambda text: "ok", [asks("?", first, do="images")], agent=program)
    (episode,) = played.episodes
    assert (episode.score, episode.chains, episode.turns) == (2.0, 1, 2)
    assert [visual.key for visual in episode.visuals] == [first.key] * 2
    assert [len(piece.visuals) for piece in episode.pieces] == [0, 1, 0]
    assert requests[0].prompt == asks("?", first).tokens
    told = np.concatenate([piece.tokens for piece in episode.pieces[:2]]).tolist()
    assert requests[1].prompt == (*episode.prompt, *told)
    assert [len(request.visuals) for request in requests] == [1, 2]


def test_long_texts_beside_an_image_are_cut():
    def chart(side: int) -> list:
        """Talk much.\n\nArgs:\n    side: of the image."""
        return ["a" * 50, drawn(side), "b" * 50]

    played, _ = play(asks_for(48), tools=[chart], limits={"observation_tokens": 41})
    told = TOKENIZER.decode(played.episodes[0].pieces[1].tokens)
    shown = f"<|vision_start|>{'<|image_pad|>' * 9}<|vision_end|>"
    assert f"{'a' * 8} ... aaa{shown}{'b' * 8} ... bbb" in told


LOOP = """
from types import SimpleNamespace
from PIL import Image

class Looks:
    # as loops of verl use a processor: it shows the row's image, and another one later
    def __init__(self, trainer_config, server_manager, processor, dataset_cls, **_):
        self.server, self.processor, self.dataset = server_manager, processor, dataset_cls
    def encode(self, messages, images):
        options = {"add_generation_prompt": True, "tokenize": False}
        text = self.processor.apply_chat_template(messages, **options)
        inputs = self.processor(text=[text], images=images, videos=None, return_tensors="pt")
        return inputs.pop("input_ids").squeeze(0).tolist()
    async def run(self, sampling_params, raw_prompt, **_):
        async def draw(ids, images):
            given = {"prompt_ids": ids, "sampling_params": sampling_params, "image_data": images}
            return (await self.server.generate("x", **given)).token_ids
        size = self.processor.image_processor.patch_size
        images = list(self.dataset.process_vision_info(raw_prompt, image_patch_size=size)[0])
        prompt = self.encode(raw_prompt, images)
        first = await draw(prompt, images)
        images.append(Image.new("RGB", (16, 16)))
        content = [{"type": "image"}, {"type": "text", "text": "more"}]
        told = self.encode([{"role": "user", "content": content}], images[1:])
        last = await draw(prompt + first + told, self.shown(images))
        mask = [1] * len(first) + [0] * len(told) + [1] * len(last)
        fields = {"prompt_ids": prompt, "response_ids": first + told + last, "response_mask": mask}
        return SimpleNamespace(**fields, multi_modal_data={"images": images}, reward_score=0.5)
    def shown(self, images):
        return images

class Forgets(Looks):
    def shown(self, images):
        return images[-1:]
"""


def test_a_loop_of_verl_s_shows_images(tmp_path):
    (tmp_path / "looks.py").write_text(LOOP)
    first = PROCESSOR.image(drawn(32, 90))

    def run(name):
        agent = FunctionSpec("verl_agent_loop", {"loop": f"{tmp_path / 'looks.py'}:{name}"})
        return play(lambda text: "ok", [asks("?", first)], agent=agent)

    with pytest.raises(RunError, match="stream"):
        run("Forgets")
    played, requests = run("Looks")
    (episode,) = played.episodes
    assert [visual.tokens for visual in episode.visuals] == [4, 1]
    assert episode.visuals[0].key == first.key and episode.score == 0.5
    assert [len(request.visuals) for request in requests] == [1, 2]


def test_what_verl_s_tools_show_stands_before_their_text():
    response = SimpleNamespace(text="here", image=[drawn(16), drawn(16)], video=None)
    answer = tool.to_result(Observation(response_content(response)))
    assert (answer.text, [place for place, _ in answer.images]) == ("here", [0, 0])
    result = tool.ToolResult("t", answer.text, images=answer.images)
    assert [part["type"] for part in result.content] == ["image", "image", "text"]
    sent = tool.encode_tool_result(3, answer)
    assert tool.decode_tool_result(sent, 3) == answer
    assert tool.decode_tool_result(sent.replace(b"[[0", b"[[9", 1), 3) is None
