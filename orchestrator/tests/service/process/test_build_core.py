"""Cores and limits from a config."""

import subprocess
import sys

import msgspec
import pytest
from service_kit_process import SECRET

from orchestrator.roles import Router
from orchestrator.service.config import EngineSettings, Model, ServiceConfig
from orchestrator.service.messages import WorkerSpec
from orchestrator.service.process.build import build, cost_of, policy_of, settings_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from orchestrator.model.make import make_model
    from orchestrator.model.presets import v41_nano

    return str(make_model(v41_nano(), tmp_path_factory.mktemp("nano"), seed=20))


def config_of(folder, **engine):
    return ServiceConfig(model=Model(folder), engine=EngineSettings(**engine))


def test_limits_of_the_door(folder):
    from orchestrator.model.checkpoint.reader import Checkpoint

    positions = Checkpoint(folder).config.max_position_embeddings
    limits = policy_of(config_of(folder, num_blocks=40, max_waiting=17)).limits
    assert (limits.context, limits.pool, limits.most_waiting) == (min(positions, 40 * 128), 40 * 128, 17)
    assert policy_of(config_of(folder, num_blocks=40, max_model_len=1000)).limits.context == 1000
    assert policy_of(config_of(folder, num_blocks=1 << 20)).limits.context == positions


def test_the_context_is_that_of_the_engine(folder):
    from orchestrator.model.checkpoint.reader import Checkpoint

    model = Checkpoint(folder).config
    for engine in ({"num_blocks": 3}, {"num_blocks": 512}, {"num_blocks": 9, "max_model_len": 1152}):
        config = config_of(folder, **engine)
        assert policy_of(config).limits.context == settings_of(config.engine).context(model)


@pytest.mark.parametrize("length", [0, -1, 40 * 128 + 1])
def test_a_context_that_cannot_be(folder, length):
    with pytest.raises(ValueError, match="max_model_len"):
        policy_of(config_of(folder, num_blocks=40, max_model_len=length))


def test_a_door_that_is_late_refuses_before_its_clients_give_up(folder):
    config = msgspec.structs.replace(config_of(folder), times={"first_token": 30.0})
    limits = policy_of(config).limits
    assert limits.target * limits.patience == pytest.approx(15.0)


def test_settings_of_an_engine():
    made = settings_of(EngineSettings(max_num_seqs=700, num_blocks=9, image_bytes=5, threads=3))
    assert (made.max_num_seqs, made.num_blocks, made.image_bytes) == (700, 9, 5)
    assert made.max_step_tokens == 700  # every decoding request gets its token in each step


def test_a_router_without_an_engine(folder):
    spec = WorkerSpec(
        "router", "router", 3, config_of(folder), "127.0.0.1", "tcp://127.0.0.1:1", SECRET.hex(), 1, "/nonexistent"
    )
    built = build(spec, lambda entry, digest: None)
    assert isinstance(built.core, Router) and built.core.incarnation == 3 and built.port is None
    built.closers.close()


def test_costs_of_a_cpu_keep_steps_short():
    """What a worker takes at once is read within the time for an answer, however slow the CPU."""
    from orchestrator.roles import Settings
    from orchestrator.service.process.build import CPU_QUOTA

    slow = 200  # tokens a second
    assert CPU_QUOTA.tokens / slow < Settings().answer
    assert cost_of("cpu").prompt(3000, 0) == pytest.approx(1.05)
    assert cost_of("cuda").prompt(3000, 0) < 0.1


def test_no_model(tmp_path):
    with pytest.raises(OSError):
        policy_of(config_of(str(tmp_path)))


def test_nothing_is_imported_before_the_threads_are_set():
    """PyTorch takes its number of threads from the environment when it is imported."""
    code = "import orchestrator.service.process.main, sys; print('torch' in sys.modules, 'numpy' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert said.stdout.split() == ["False", "False"]
