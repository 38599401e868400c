"""HTTP for one engine: OpenAI Chat Completions and Responses, Anthropic Messages, health and metrics."""

from orchestrator.server.app import create_app
from orchestrator.server.settings import ServerSettings

__all__ = ["ServerSettings", "create_app"]
