import base64
import copy
import io
from types import SimpleNamespace

import pytest
from PIL import Image

from jaxrl_llm.config.programs import ServeConfig
from jaxrl_llm.data.chat import load_tokenizer, stop_ids
from jaxrl_llm.data.visuals.processor import VisualProcessor
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.hf.config import read_spec
from jaxrl_llm.rollout.openai_api.requests import APIError, ServedModel, parse_chat, text_limit
from jaxrl_llm.rollout.openai_api.responses_api import chat_request
from jaxrl_llm.serve import open_served_model
from tests.refusals import refuses

MODEL = "configs/vision/model"
TOKENIZER = load_tokenizer(MODEL)
STOPS = stop_ids(TOKENIZER, MODEL)
PROCESSOR = VisualProcessor.from_directory(MODEL)
IMAGE = PROCESSOR.placeholders.image_id
LIMIT = text_limit(TOKENIZER, 256)
SEEING = ServedModel("tiny", TOKENIZER, STOPS, 272, 256, 8, LIMIT, processor=PROCESSOR)


def file_of(kind="PNG", size=(32, 48)):
    file = io.BytesIO()
    Image.new("RGB", size, (9, 99, 199)).save(file, kind)
    return file.getvalue()


def url_of(data, kind="png"):
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def shows(*urls, text="what is it?"):
    """Return a message that shows images before its text."""
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def chat(*messages, **fields):
    return parse_chat({"messages": [*messages], "max_tokens": 4} | fields, SEEING)


def test_a_chat_shows_images_in_the_place_of_their_parts():
    red, blue = file_of(size=(48, 32)), file_of("JPEG", size=(32, 32))
    asked = chat(shows(url_of(red), url_of(blue, "jpeg")), n=2)
    pads = ["<|image_pad|>" * count for count in (6, 4)]
    marked = "".join(f"<|vision_start|>{pad}<|vision_end|>" for pad in pads)
    assert TOKENIZER.decode(asked.prompts[0]) == f"<|user|>{marked}what is it?<|end|><|assistant|>"
    assert [visual.key for visual in asked.visuals] == [PROCESSOR.image(f).key for f in (red, blue)]
    assert all(request.visuals == asked.visuals for request in asked.requests())


def test_tools_show_images_and_the_responses_api_does():
    calls = "{% for c in message.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"
    tokenizer = copy.deepcopy(TOKENIZER)
    end = "{{- '<|end|>' }}"
    tokenizer.chat_template = tokenizer.chat_template.replace(end, calls + end)
    url, look = url_of(file_of()), {"name": "look", "arguments": "{}"}
    parts = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": "Hi"}]
    output = {"type": "function_call_output", "call_id": "a", "output": parts}
    items = [{"type": "function_call", "call_id": "a"} | look, output]
    for said in ([{"role": "user", "content": parts}], items):
        request = parse_chat(chat_request({"input": said}), SEEING._replace(tokenizer=tokenizer))
        assert [v.key for v in request.visuals] == [PROCESSOR.image(file_of()).key]
        assert request.prompts[0].count(IMAGE) == 6
        assert "<|vision_end|>Hi<|end|>" in TOKENIZER.decode(request.prompts[0])


def test_an_image_that_can_t_be_used_is_refused(served, subtests):
    """Which files are none, and how they are told, is for tests/data/test_pictures.py."""
    hello, good = {"role": "user", "content": "Hi"}, url_of(file_of())
    for url, model in (
        *(("http://localhost:1/a.png", SEEING), ("/etc/passwd", SEEING), (good, served)),
        *(("file:///etc/passwd", SEEING), (url_of(b"hello"), SEEING)),
        *(("data:image/png;base64,%%%", SEEING), ("data:text/plain;base64,aGk=", SEEING)),
    ):
        with subtests.test(url=url[:40]):
            with pytest.raises(APIError) as caught:
                parse_chat({"messages": [hello, shows(url)]}, model)
            assert (caught.value.status, caught.value.param) == (400, "messages[1]")
    for image in ({"url": 3}, {"url": good, "detail": "most"}):
        with subtests.test(str(image)[:40]), pytest.raises(APIError, match="parts"):
            chat({"role": "user", "content": [{"type": "image_url", "image_url": image}]})


def test_a_text_can_t_pass_for_an_image():
    with pytest.raises(APIError, match="placeholder"):
        chat(shows(url_of(file_of()), text="<|image_pad|>"))


def test_images_that_can_t_fit_are_not_decoded(monkeypatch):
    decoded, read = [], PROCESSOR.image
    monkeypatch.setattr(PROCESSOR, "image", lambda source: decoded.append(1) or read(source))
    with pytest.raises(APIError) as caught:
        chat(shows(*[url_of(file_of(size=(64, 160)))] * 100))
    assert caught.value.code == "context_length_exceeded"
    assert len(decoded) < 30


def test_images_are_read_as_the_server_s_config_says(monkeypatch):
    def policy(path, layout, *, vision, **_):
        model = Decoder(read_spec(path, vision=vision))
        loaded = {"tokenizer": TOKENIZER, "stops": STOPS, "source": path, "params": {}}
        return SimpleNamespace(model=model, layout=layout, **loaded)

    monkeypatch.setattr("jaxrl_llm.training.policy.load_policy", policy)
    monkeypatch.setattr("jaxrl_llm.rollout.build.loaded_engine", lambda *_, **options: options)

    def tokens(side, **keys):
        served, _ = open_served_model(ServeConfig(model=str(MODEL), kv_cache_gb=0.1, **keys))
        return served.processor and served.processor.image(file_of(size=(side, side))).tokens

    assert tokens(64) is None
    assert tokens(64, vision=True, max_pixels=1024) == 4
    assert tokens(32, vision=True, min_pixels=64 * 64) == 16
    for keys in ({"max_pixels": 9}, {"vision": True, "max_pixels": 9}):
        with refuses():
            tokens(64, **keys)
