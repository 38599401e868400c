"""Prompts to continue: the beginnings of held-out texts, and questions as the server would render them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.evaluate.text import HeldOut
from orchestrator.text.tokenizer import Tokenizer

QUESTIONS = (
    "What does heapq.heappush do?",
    "Write a function that returns the second largest number of a list.",
    "What is 4817 plus 3926?",
    "I have just installed Python. What should I try first?",
    "How do I copy a folder with shutil?",
    "Write a function that says whether a year is a leap year.",
    "What does textwrap.dedent do?",
    "Hello, it is raining here today.",
    "Spell the word rhinoceros.",
    "Explain this code: print([y - 1 for y in range(3, 9)])",
    "What is the value of len('windowpane') * 7?",
    "Write a class for a queue of at most ten items.",
    "What does bisect.insort do?",
    "What is 1092 divided by 12?",
    "How do I add an option to an argparse parser?",
    "Reverse the word lantern.",
    "What does statistics.median return?",
    "Write a function that counts the vowels in a text.",
    "Good evening, I need some help with a Python script.",
    "What does csv.DictReader do?",
    "Fix this code: while True print('again')",
    "Write a function that splits a list into chunks of size n.",
    "What is the difference between shutil.copy and shutil.copyfile?",
    "How do I print a calendar of one month?",
    "What does difflib.get_close_matches return?",
    "Name three rivers.",
    "Write a function that computes the greatest common divisor of two numbers.",
    "Is 221 a prime number?",
    "How do I read an ini file with configparser?",
    "What does ipaddress.ip_network do?",
    "That was useful, thanks a lot!",
    "Write a function that turns a fraction into a percentage.",
)
"""Questions written for this evaluation; those about the library name held-out modules."""


@dataclass(frozen=True)
class Prompt:
    """Token ids to continue; `kind` is "code" or "conversation"."""

    kind: str
    tokens: tuple[int, ...]


def code_prompts(heldout: HeldOut, count: int, length: int) -> list[Prompt]:
    """Held-out texts cut after `length` tokens."""
    return [Prompt("code", window.tokens) for window in heldout.windows(count, length)]


def conversation_prompts(tokenizer: Tokenizer, questions: Sequence[str] = QUESTIONS) -> list[Prompt]:
    """One user turn each, to be answered without thinking."""
    import deepseek_recipe as recipe

    encoding = recipe.DeepseekV41Encoding().with_tokenizer(tokenizer.recipe)
    encoding = encoding.with_special_tokens(tokenizer.recipe_specials)
    conversations = (recipe.Conversation([recipe.UserMessage(q)], thinking_mode=False) for q in questions)
    return [Prompt("conversation", tuple(encoding.encode(c))) for c in conversations]
