"""Images in offline use."""

from __future__ import annotations

import pytest
from PIL import Image

from orchestrator import LLM
from orchestrator.commands.errors import UsageError
from orchestrator.commands.generate import GenerateOptions, generate
from orchestrator.vision import ImagePrompt, ImageRefused


@pytest.fixture(scope="module")
def llm(nano_path):
    return LLM(nano_path, num_blocks=32)


def test_files_bytes_and_images_are_the_same(llm, kit, tmp_path):
    image = kit.noise(100, 80)
    (tmp_path / "a.png").write_bytes(kit.encoded(image))
    given = [tmp_path / "a.png", kit.encoded(image), image]
    prompts = [ImagePrompt(["See ", each, " there", [5, 6]]) for each in given]
    outputs = llm.generate([*prompts, "text alone"], kit.greedy(6))
    assert outputs[0].token_ids == outputs[1].token_ids == outputs[2].token_ids
    assert outputs[0].prompt_token_ids[-2:] == [5, 6] and outputs[0].prompt_token_ids.count(510) == 10
    assert llm.engine.images.counters.hits == 2 and llm.engine.images.counters.held_bytes == 0
    single = llm.generate(prompts[0], kit.greedy(6))
    assert [each.token_ids for each in single] == [outputs[0].token_ids]
    streamed = [e.token_id for e in llm.stream(prompts[0], kit.greedy(6)) if hasattr(e, "token_id")]
    assert streamed == outputs[0].token_ids


def test_what_is_no_prompt(llm, kit, tmp_path):
    with pytest.raises(ImageRefused, match=r"parts\[1\]: the image cannot be decoded"):
        llm.generate(ImagePrompt(["a", b"nonsense"]))
    with pytest.raises(FileNotFoundError):
        llm.generate(ImagePrompt([tmp_path / "absent.png"]))
    with pytest.raises(ValueError, match=r"parts\[0\]: got int, allowed is text, token ids, a Path, bytes or a PIL"):
        llm.generate(ImagePrompt([3]))
    assert ImagePrompt([Image.new("L", (30, 30)), [4]]).place(llm.tokenizer.encode, llm.engine.model.config)[0][-1] == 4
    assert not llm.engine.has_work


def test_a_model_of_text_takes_none(kit, nano):
    from dataclasses import replace

    with pytest.raises(ValueError, match="prompt: got images, allowed is text"):
        ImagePrompt([kit.noise(3, 3)]).place(lambda text: [], replace(nano.config, vision=None))


def test_the_command_line(nano_path, kit, tmp_path, capsys):
    """`fathom generate --image`: another picture, another text; and what a wrong one is called."""
    options = {"model": str(nano_path), "temperature": 0.0, "max_tokens": 8, "prompt": "What is this?"}
    texts = []
    for number in range(2):
        path = tmp_path / f"{number}.png"
        path.write_bytes(kit.encoded(kit.noise(100, 80, seed=number)))
        assert generate(GenerateOptions(**options, image=(path,), stats=True)) == 0
        texts.append(capsys.readouterr())
    assert texts[0].out and texts[0].out != texts[1].out
    with pytest.raises(ImageRefused, match=r"parts\[0\]: the image cannot be decoded"):
        (tmp_path / "words.png").write_bytes(b"words")
        generate(GenerateOptions(**options, image=(tmp_path / "words.png",)))
    with pytest.raises(UsageError, match="--image: got files and --ep"):
        generate(GenerateOptions(**options, image=(path,), ep=2))
