"""`fathom serve`: the HTTP server over one engine in this process."""

from __future__ import annotations

import gc
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.commands.device import check_device
from orchestrator.commands.errors import UsageError
from orchestrator.commands.images import image_limits_of
from orchestrator.commands.paths import cache_folder, find_model
from orchestrator.commands.prefix import address_of, prefix_mode_of, shared_windows, stored_prefixes
from orchestrator.commands.speculation import speculation_of
from orchestrator.commands.threads import use_threads

if TYPE_CHECKING:
    from orchestrator.server.settings import ServerSettings
    from orchestrator.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class ServeOptions:
    """The options of the command, as given."""

    model: str | None = None
    name: str | None = None
    alias: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8000
    api_key_file: Path | None = None
    max_context: int | None = None
    max_requests: int = 256
    max_num_seqs: int = 16
    num_blocks: int = 512
    max_body_mb: float = 8.0
    default_max_tokens: int | None = None
    requests_per_minute: float = 0.0
    tokens_per_minute: float = 0.0
    thinking: bool | None = None
    device: str = "cpu"
    reproducible: bool = True
    speculation: str = "scheduled"
    prefix_cache: str | None = None
    cache_folder: Path | None = None
    cache_gb: float = 16.0
    cache_key_gb: float | None = None
    window_listen: str | None = None
    window_peer: tuple[str, ...] = ()
    max_images: int = 64
    max_image_mb: float = 32.0
    max_image_mpixels: float = 64.0
    image_urls: bool = True
    image_network: tuple[str, ...] = ()
    image_cache_gb: float = 1.0
    threads: int | None = None
    log_level: str = "info"


def serve(options: ServeOptions) -> int:
    """Serve until interrupted; returns the exit status."""
    use_threads(options.threads)
    device = check_device(options.device)
    speculation = speculation_of(options.speculation)
    stored = options.cache_folder is not None
    prefix_cache = prefix_mode_of(options.prefix_cache, options.reproducible, stored)
    if stored and prefix_cache == "off":
        raise UsageError("--cache-folder: got a folder and --prefix-cache off, allowed is one of them")
    keys = read_keys(options.api_key_file)
    if options.cache_key_gb is not None and not (stored and keys):
        raise UsageError("--cache-key-gb: got a budget, allowed only with --cache-folder and API keys")
    _check_windows(options, prefix_cache)
    image_limits = image_limits_of(options)
    settings = server_settings(options, name="unnamed", max_context=2, thinking=False, keys=keys)
    from orchestrator.server.run import make_server, open_socket

    try:  # before the model is loaded: a taken port should not cost a minute
        listening = open_socket(settings)
    except ValueError as error:
        raise UsageError(f"--{error}") from None
    with listening:
        folder = find_model(options.model)
        from orchestrator.engine.config import EngineConfig
        from orchestrator.engine.curve_cache import use_curve
        from orchestrator.engine.engine import Engine
        from orchestrator.model.load import load_model
        from orchestrator.roles.local import through_roles
        from orchestrator.server import create_app
        from orchestrator.text import load_tokenizer
        from orchestrator.vision import ImageReader

        tokenizer = load_tokenizer(folder)
        dense = "fixed" if options.reproducible else "library"
        config = EngineConfig(
            max_num_seqs=options.max_num_seqs,
            max_waiting=options.max_requests,
            num_blocks=options.num_blocks,
            max_model_len=options.max_context,
            max_step_tokens=max(EngineConfig.max_step_tokens, 8 * options.max_num_seqs),
            dense=dense,  # type: ignore[arg-type]
            device=device,
            speculation=speculation,
            prefix_cache=prefix_cache,
            image_bytes=int(options.image_cache_gb * 2**30),
        )
        model = load_model(folder, dense=config.dense, device=config.device)
        try:
            config.context(model.config)
        except ValueError as error:
            raise UsageError(f"--max-context: {str(error).removeprefix('max_model_len: ')}") from None
        engine = Engine(model, tokenizer, config)
        use_curve(engine, cache_folder() / "curves")
        thinking = thinks(options, tokenizer)
        name = options.name or folder.resolve().name
        settings = server_settings(options, name=name, max_context=engine.context, thinking=thinking, keys=keys)
        images = None if engine.images is None else ImageReader(model.config, image_limits)
        gc.collect()
        gc.freeze()  # the model lives as long as the process: no collection needs to walk it between steps
        with (
            stored_prefixes(engine, options.cache_folder, options.cache_gb, folder, _budgets(options, keys)),
            shared_windows(engine, options.window_listen, options.window_peer, folder),
        ):
            running = through_roles(engine)
            try:
                app = create_app(running, tokenizer, settings, grammars=engine.grammars, images=images)
                port = listening.getsockname()[1]
                url = f"http://{f'[{settings.host}]' if ':' in settings.host else settings.host}:{port}"
                print(f"Serving {name} on {url} (docs: {url}/docs, context {engine.context} tokens)", file=sys.stderr)
                make_server(app, settings, log_level=options.log_level).run(sockets=[listening])
            finally:
                running.close()
                if images is not None:
                    images.close()
    return 0


def thinks(options: ServeOptions, tokenizer: Tokenizer) -> bool:
    """The small models never learnt to close their reasoning, so they answer without unless told otherwise."""
    return options.thinking if options.thinking is not None else tokenizer.vocab_size > 100_000


def _check_windows(options: ServeOptions, prefix_cache: str) -> None:
    """Refuse addresses that are none before the model is loaded."""
    for option, texts in (("--window-listen", (options.window_listen,)), ("--window-peer", options.window_peer)):
        for text in texts:
            if text is not None:
                address_of(option, text)
                if prefix_cache == "off":
                    raise UsageError(f"{option}: got {text!r} and no prefix cache, allowed is one of them")


def read_keys(file: Path | None) -> tuple[str, ...]:
    """Keys from a file (one a line, # starts a comment) and from FATHOM_API_KEYS (separated by commas).

    They are no command-line option, as command lines can be read by every user of the machine.
    """
    keys = [key.strip() for key in os.environ.get("FATHOM_API_KEYS", "").split(",")]
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--api-key-file: {file} cannot be read ({error})") from None
        found = [line.split("#", 1)[0].strip() for line in lines]
        if not any(found):
            raise UsageError(f"--api-key-file: {file} holds no key; write one a line")
        keys += found
    return tuple(dict.fromkeys(key for key in keys if key))


def _budgets(options: ServeOptions, keys: tuple[str, ...]) -> dict[str, float]:
    """GiB of the cache folder that each API key's blocks may take, by the name that salts its blocks."""
    from orchestrator.server.auth import caller_of

    return {} if options.cache_key_gb is None else {caller_of(key): options.cache_key_gb for key in keys}


def server_settings(
    options: ServeOptions, *, name: str, max_context: int, thinking: bool, keys: tuple[str, ...]
) -> ServerSettings:
    """What the options say of the HTTP server. Raises UsageError naming the option that is wrong."""
    from pydantic import ValidationError

    from orchestrator.server.settings import ServerSettings, check_bind

    try:
        settings = ServerSettings(
            model_name=name,
            aliases=options.alias,
            host=options.host,
            port=options.port,
            api_keys=keys,
            max_context=max_context,
            thinking=thinking,
            default_max_tokens=options.default_max_tokens,
            max_body_bytes=int(options.max_body_mb * 2**20),
            max_requests=options.max_requests,
            requests_per_minute=options.requests_per_minute,
            tokens_per_minute=options.tokens_per_minute,
        )
        check_bind(settings)
    except ValidationError as error:
        first = error.errors()[0]
        where = "-".join(str(part) for part in first["loc"]).replace("_", "-").replace("api-keys", "api-key-file")
        raise UsageError(f"--{where}: {first['msg']}") from None
    except ValueError as error:
        raise UsageError(f"--{error}") from None
    return settings
