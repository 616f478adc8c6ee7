"""What the policy is asked to do and how it is rewarded.

Token ids 0 to 255 are bytes, 256 begins a text and 257 ends one. Prompts are the beginnings of small Python functions.
In a tool task the engine interrupts the policy after some tokens and inserts what a tool printed: those tokens are
part of the response, and nobody sampled them.
"""

from collections.abc import Sequence

import msgspec

BEGIN, END, PAD = 256, 257, 258


class Task(msgspec.Struct, frozen=True):
    """One prompt; `tool` is inserted after `tool_after` sampled tokens when it is not empty."""

    prompt_id: str
    text: str
    sampled: int
    tool: str = ""
    tool_after: int = 0

    @property
    def prompt(self) -> list[int]:
        """The prompt's token ids."""
        return [BEGIN, *self.text.encode()]

    @property
    def tool_tokens(self) -> list[int]:
        """The inserted token ids."""
        return list(self.tool.encode())


TASKS = (
    Task("first-number", 'def first_number(text):\n    """Return the first number in text."""\n    for ', 72),
    Task("close", "    def close(self):\n        if self._closed:\n            return\n", 48),
    Task("repr", "    def __repr__(self):\n        return ", 40),
    Task("average", 'def average(values):\n    """Return the mean."""\n', 64, "\n# checked: 3 values, 0 errors\n", 24),
    Task("import", "import os\nimport sys\nimport ", 56),
    Task("raise", "    if not isinstance(name, str):\n        raise TypeError(", 44),
    Task("parse-line", "def parse_line(line):\n    fields = line.split()\n", 68, "\n# tool: 12 lines parsed\n", 30),
    Task("exit", "    def __exit__(self, *args):\n        self.", 52),
    Task("lookup", "def lookup(table, key, default=None):\n    try:\n        ", 60),
    Task("init", "class Counter:\n    def __init__(self, size):\n        self.size = size\n", 56),
    Task("count", "    count = 0\n    for line in stream:\n", 64, "\n# stream: 7 lines\n", 20),
    Task("assert", "    def test_empty(self):\n        self.assertEqual(", 48),
    Task("compare", "    def __eq__(self, other):\n        if ", 60),
    Task("doc", '    """Open a file.\n\n    The argument mode is a string that ', 72),
    Task("loop", "while True:\n    chunk = read(", 64, "\n# read 512 bytes\n", 28),
    Task("main", 'if __name__ == "__main__":\n    ', 40),
)


def tasks_of(step: int, groups: int) -> list[Task]:
    """The `groups` tasks of one step: the list is gone through in order, again and again."""
    return [TASKS[(step * groups + i) % len(TASKS)] for i in range(groups)]


def reward(response: Sequence[int], loss_mask: Sequence[int]) -> float:
    """The share of sampled tokens that are lowercase ASCII letters: cheap, exact and easy to move."""
    sampled = [token for token, active in zip(response, loss_mask) if active]
    return sum(97 <= token <= 122 for token in sampled) / len(sampled) if sampled else 0.0
