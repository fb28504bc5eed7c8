"""`python -m jaxrl_llm.serve --model DIR a.b=c …`: an OpenAI-compatible server; docs/serving.md."""

import contextlib
import ipaddress
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any

from jaxrl_llm.cli import config_main
from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.programs import ServeConfig
from jaxrl_llm.config.sections import MeshConfig
from jaxrl_llm.monitoring.activity import activity

API_KEY_VARIABLE = "JAXRL_LLM_API_KEY"
KEEP_ALIVE_S = 60  # longer than clients keep a connection, or they would write to a closed one

log = logging.getLogger("jaxrl_llm.serve")  # also where it is the program


def serve(config: ServeConfig) -> None:
    """Load the model and answer requests until a signal ends it.

    Raises:
        ConfigError: a package of the extra `serve` is not installed, the address is taken, or the
            model can't be read.
    """
    try:
        import prometheus_client  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn
    except ImportError as error:
        raise ConfigError(f"{error}: install the extra, as in pip install -e '.[serve]'") from error
    with activity("starting"):  # jax is slow to import
        from jaxrl_llm.monitoring.clock import reporting_compilation
        from jaxrl_llm.monitoring.writer import quiet_libraries
        from jaxrl_llm.runs.compile_cache import use_compilation_cache
        from jaxrl_llm.serving.app import make_app

    quiet_libraries()
    api_key = config.api_key or os.environ.get(API_KEY_VARIABLE) or None
    if api_key is None and not is_loopback(config.host):
        log.warning("host=%s without an API key: whoever reaches it may use it", config.host)
    with (
        bind(config.host, config.port) as listener,
        use_compilation_cache(),
        reporting_compilation(),
    ):
        log.info("loading %s", config.model)
        served, engine = open_served_model(config)
        try:
            server = uvicorn.Server(
                uvicorn.Config(
                    make_app(engine, served, config.limits, api_key),
                    access_log=False,
                    server_header=False,
                    ws="none",
                    timeout_keep_alive=KEEP_ALIVE_S,
                    timeout_graceful_shutdown=round(config.limits.shutdown_s),
                )
            )
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, server.handle_exit)  # also after uvicorn, which raises it
            host = f"[{config.host}]" if ":" in config.host else config.host
            tokens = engine.stats().cache_tokens
            log.info("the KV cache has room for %d tokens (kv_cache_gb)", tokens)
            log.info("serving %s at http://%s:%d/v1", served.name, host, config.port)
            server.run(sockets=[listener])
        finally:
            engine.close()


def open_served_model(config: ServeConfig) -> tuple[Any, Any]:
    """Load the model; return what is served and the engine that holds it.

    Raises:
        ConfigError: the directory can't be read, it has no vision tower though `vision` asks for
            it, or it does not fit the mesh.
    """
    from jaxrl_llm.data.visuals.processor import configured_processor
    from jaxrl_llm.models.model import for_length
    from jaxrl_llm.rollout.build import loaded_engine
    from jaxrl_llm.rollout.engine import EngineSettings
    from jaxrl_llm.rollout.openai_api.requests import ServedModel, text_limit
    from jaxrl_llm.training.load_model import open_layout
    from jaxrl_llm.training.policy import load_policy

    mesh = MeshConfig(rollout=config.mesh.rollout, rules=config.mesh.rules)
    with activity("opening the devices"):
        layout = open_layout(mesh, "rollout", config.mesh.rollout)
    policy = load_policy(
        config.model, layout, on_host=True, function_from=config.function_from, vision=config.vision
    )
    max_tokens = config.max_tokens or policy.model.max_positions
    if max_tokens is None:
        raise ConfigError("max_tokens: the model names no longest sequence; set it")
    served = ServedModel(
        name=config.name or config.model,
        tokenizer=policy.tokenizer,
        stop_ids=policy.stops,
        vocab_size=policy.model.vocab_size,
        max_tokens=max_tokens,
        max_answers=config.limits.max_answers,
        text_limit=text_limit(policy.tokenizer, max_tokens),
        call_format=find_call_format(policy.tokenizer, config.call_format),
        processor=configured_processor(
            policy.source if config.vision else None,
            "vision",
            max_pixels=config.max_pixels,
            min_pixels=config.min_pixels,
        ),
    )
    policy.tokenizer("", add_special_tokens=False)  # sets it up, before threads share it
    cache_gb = config.kv_cache_gb or default_cache_gb(
        policy.params, policy.layout.mesh.local_devices
    )
    settings = EngineSettings(config.max_running_sequences, max_tokens, cache_gb, config.dtype)
    model = for_length(policy.model, max_tokens)
    engine = loaded_engine(
        model, policy.params, settings, policy.layout, policy.tokenizer, sequences=1
    )
    return served, engine


def find_call_format(tokenizer: Any, given: str | None) -> str | None:
    """Return in which format the model writes calls of tools; None: requests with tools can't be.

    Args:
        tokenizer: its chat template writes calls, perhaps.
        given: by the config.

    Raises:
        ConfigError: there is no such format.
    """
    from jaxrl_llm.data.chat import ChatTemplate
    from jaxrl_llm.data.turns import FORMATS, choose_format

    if given is None:
        with contextlib.suppress(ValueError):  # which a request with tools is told
            return choose_format(ChatTemplate(tokenizer))
    elif given not in FORMATS:
        raise ConfigError(f"call_format: got {given!r}, expected one of {', '.join(FORMATS)}")
    return given


def default_cache_gb(params: Any, devices: Sequence[Any]) -> float:
    """Return the GB of each device that keys and values may have at most, beside the weights.

    A GPU gives them four fifths of its memory less the weights, as if it held all of these; a CPU
    half of the machine's, shared by its devices.

    Args:
        params: the weights, arrays by name.
        devices: those of this process that the engine runs on.
    """
    import jax

    stats = devices[0].memory_stats()
    if stats and "bytes_limit" in stats:
        weights = sum(array.nbytes for array in jax.tree.leaves(params))
        return max(0.8 * stats["bytes_limit"] - weights, 0.0) / 1e9
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return physical / 2 / len(devices) / 1e9


def bind(host: str, port: int) -> socket.socket:
    """Return a socket with an address, which does not listen yet.

    Raises:
        ConfigError: the address is taken, or none of this machine.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"host={host}, port={port}: {error.strerror or error}") from error
    return listener


def is_loopback(host: str) -> bool:
    """Tell whether only this machine reaches an address.

    >>> is_loopback("127.0.0.1"), is_loopback("0.0.0.0"), is_loopback("localhost")
    (True, False, True)
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    about = "Serve a language model to clients of OpenAI's API."
    flags = {"model": "store", "api-key": "store"}
    return config_main("jaxrl_llm.serve", about, ServeConfig, serve, arguments, flags=flags)


if __name__ == "__main__":
    sys.exit(main())
