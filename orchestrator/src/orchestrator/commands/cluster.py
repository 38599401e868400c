"""`fathom serve --cluster`: the roles as processes of their own, behind one HTTP server."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from orchestrator.commands.cluster_options import ClusterOptions, config_of
from orchestrator.commands.errors import UsageError
from orchestrator.commands.images import image_limits_of
from orchestrator.commands.paths import find_model
from orchestrator.commands.serve import ServeOptions, read_keys, server_settings, thinks

if TYPE_CHECKING:
    from orchestrator.service.config import ServiceConfig


def serve_cluster(options: ServeOptions, roles: ClusterOptions, given: frozenset[str]) -> int:
    """Serve until interrupted; returns the exit status. `given`: fields of `options` that were given."""
    config = _with_model(config_of(options, roles, given), options)
    if roles.print_config:
        from orchestrator.service.config import describe

        print(json.dumps(describe(config), indent=2))
        return 0
    keys = read_keys(options.api_key_file)
    limits = image_limits_of(options)
    settings = server_settings(options, name="unnamed", max_context=2, thinking=False, keys=keys)
    if config.cluster.launcher == "ray":
        from orchestrator.service.supervise.launch.ray import import_ray

        import_ray()
    from orchestrator.server.run import open_socket

    try:  # before anything is started: a taken port should not cost a minute
        listening = open_socket(settings)
    except ValueError as error:
        raise UsageError(f"--{error}") from None
    # uvicorn has handlers of its own; the service's words about its workers go beside them.
    level = logging.getLevelNamesMapping().get(options.log_level.upper(), logging.INFO)
    logging.basicConfig(level=level, format="%(levelname)s:     %(message)s")
    with listening:
        from orchestrator.service.run import serve_service
        from orchestrator.text import load_tokenizer

        tokenizer = load_tokenizer(Path(config.model.path))
        name = options.name or Path(config.model.path).name
        thinking = thinks(options, tokenizer)
        settings = server_settings(options, name=name, max_context=2, thinking=thinking, keys=keys)
        return serve_service(config, settings, tokenizer, listening, image_limits=limits, log_level=options.log_level)


def _with_model(config: ServiceConfig, options: ServeOptions) -> ServiceConfig:
    """The model's folder as an absolute path; what the model cannot do is refused."""
    from orchestrator.model.config import ModelConfig

    folder = find_model(options.model or config.model.path or None).resolve()
    text = (folder / "config.json").read_text(encoding="utf-8")
    model = ModelConfig.from_hf(json.loads(text))
    if config.roles.encoder and model.vision is None:
        raise UsageError(f"--encoder: got {config.roles.encoder}, allowed is 0, as {folder} reads no images")
    try:
        from orchestrator.service.front.checks import context_of

        context_of(model, config.engine)
    except ValueError as error:
        raise UsageError(f"--max-context: {str(error).removeprefix('max_model_len: ')}") from None
    return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, path=str(folder)))
