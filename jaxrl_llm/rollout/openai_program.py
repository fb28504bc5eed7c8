"""An agent that is a program of its own, written for any library with an OpenAI client."""

import asyncio
import base64
import io
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from PIL import Image

from jaxrl_llm.rollout.chat import BrokenEpisode, Chat
from jaxrl_llm.rollout.gateway.programs import ProgramEnd, ProgramSpec, given_to_program
from jaxrl_llm.rollout.gateway.server import EpisodeGateway
from jaxrl_llm.rollout.gateway.session import GatewaySession
from jaxrl_llm.rollout.observation import EpisodeRow
from jaxrl_llm.rollout.seeds import tool_seed

LOOK_S = 1.0  # between two looks whether a program does anything


async def openai_program(
    chat: Chat,
    row: EpisodeRow,
    gateway: EpisodeGateway,
    *,
    run: str | None = None,
    command: Sequence[str] | None = None,
    python: str | None = None,
    host: str = "127.0.0.1",
    idle_s: float = 300.0,
    **keywords: Any,
) -> None:
    """Let a program lead the episode by requests to an OpenAI-compatible server.

    Either `run` or `command`. Each episode has a process and an address of its own. The number that
    a function returns is the episode's `environment_score`.

    Args:
        chat: of the episode.
        row: of the data.
        gateway: answers the requests.
        run: `my_agent.py:main` or `pkg.mod:main`, a function, async or not. It may ask by name for
            base_url, api_key, model, row, messages, ground_truth, extra_info, data_source, rng and
            seed.
        command: the words of a command, which gets these values as JSON on its standard input.
        python: the interpreter that runs `run`, where its libraries have an environment of their
            own; null is this one.
        host: address at which programs reach the server.
        idle_s: seconds that a program may take without a request; then it is killed.
        **keywords: of the function.

    Raises:
        RunError: the program can't be loaded.
        BrokenEpisode: it raised, ended with an exit code other than 0, or did nothing for long.
    """
    server, session = gateway
    told = json.dumps(keywords, sort_keys=True)
    spec = ProgramSpec(run, tuple(command or ()), python, told, server.limits)
    pool = await asyncio.to_thread(server.programs, spec)
    with server.serving(session, host) as (address, secret):
        messages = chat.contents.with_pictures(chat.prompt.messages, image_url_part)
        shown = replace(row, messages=messages)
        number, ended = pool.start(given_to_program(address, secret, shown, tool_seed(chat.seed)))
        try:
            end = await _wait_for_end(asyncio.wrap_future(ended), session, idle_s)
        finally:
            pool.kill(number)
            await session.end()
    if session.prompt_error is not None and not chat.turn:
        raise BrokenEpisode(session.prompt_error)
    if end is None or end.error is not None:
        if session.is_limited:
            return
        reason = f"did nothing for {idle_s:g} s" if end is None else str(end.error)
        output = "" if end is None else end.output
        server.tally.warn_once(reason.partition(":")[0], "%s: %s\n%s", spec.name, reason, output)
        raise BrokenEpisode(f"{spec.name}: {reason}")
    chat.score = end.value


def image_url_part(image: Image.Image) -> dict[str, Any]:
    """Return the part of a message by which a client of OpenAI's API shows an image."""
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=1)
    data = base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


async def _wait_for_end(
    ended: "asyncio.Future[ProgramEnd]", session: GatewaySession, idle_s: float
) -> ProgramEnd | None:
    """Return how a program has ended; None where it has done nothing for long.

    Raises:
        EngineFailure: the engine failed.
    """
    while session.idle_s < idle_s:
        look = min(LOOK_S, idle_s)
        await asyncio.wait(
            [ended, session.failure], timeout=look, return_when=asyncio.FIRST_COMPLETED
        )
        if session.failure.done():
            session.failure.result()
        if ended.done():
            return ended.result()
    return None
