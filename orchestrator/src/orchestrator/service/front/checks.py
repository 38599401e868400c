"""What the front refuses before anything is sent: what no engine of the service could ever run."""

from __future__ import annotations

from collections.abc import Sequence

from kernel_core.check import require
from orchestrator.engine.checks import check_request
from orchestrator.engine.config import EngineConfig
from orchestrator.engine.image_spans import PlacedImage
from orchestrator.engine.request import SamplingParams
from orchestrator.model.config import ModelConfig
from orchestrator.service.config import EngineSettings, ServiceConfig


def context_of(model: ModelConfig, settings: EngineSettings) -> int:
    """Longest request of the service's engines, in tokens. Raises ValueError where they would not start."""
    config = EngineConfig(num_blocks=settings.num_blocks, max_model_len=settings.max_model_len)
    return config.context(model)


class Checks:
    """The checks of one service. `context`: longest request in tokens. Thread-safe."""

    def __init__(self, model: ModelConfig, config: ServiceConfig, *, has_tokenizer: bool) -> None:
        self.model, self.has_tokenizer = model, has_tokenizer
        self.context = context_of(model, config.engine)
        self._encoders = config.roles.encoder

    @property
    def takes_images(self) -> bool:
        return self.model.vision is not None and self._encoders > 0

    def check(self, prompt: list[int], params: SamplingParams, images: Sequence[PlacedImage] = ()) -> None:
        """Raise ValueError as `Engine.check`, and for what does not travel between engines."""
        check_request(
            prompt,
            params,
            images,
            model=self.model,
            context=self.context,
            has_tokenizer=self.has_tokenizer,
        )
        require(
            not params.prompt_logprobs,
            "prompt_logprobs",
            "true",
            "false, since log-probabilities of a prompt do not travel between engines",
        )
        if images and not self.takes_images:
            raise ValueError(f"images: got {len(images)}, allowed is none, since the service has no encoder")
