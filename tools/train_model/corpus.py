"""The training text: sources of standard-library modules that are single files in Python 3.11 to 3.14.

Every Python installation has it, so the model can be trained again anywhere; the digest recorded in
`training_log.json` says whether another Python version holds the same bytes.
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import blake3

TRAIN_MODULES = (
    *("argparse", "ast", "base64", "bdb", "calendar", "cmd", "codecs", "codeop", "compileall", "configparser"),
    *("contextlib", "copy", "csv", "dataclasses", "difflib", "dis", "doctest", "enum", "filecmp", "fileinput"),
    *("fnmatch", "fractions", "ftplib", "functools", "getopt", "gettext", "gzip", "hashlib", "heapq", "hmac"),
    *("imaplib", "inspect", "ipaddress", "linecache", "mailbox", "mimetypes", "modulefinder", "netrc", "ntpath"),
    *("operator", "optparse", "os", "pdb", "pickle", "pickletools", "pkgutil", "platform", "plistlib", "poplib"),
    *("posixpath", "pprint", "profile", "pstats", "pydoc", "queue", "random", "reprlib", "runpy", "selectors"),
    *("shelve", "shutil", "smtplib", "socket", "socketserver", "ssl", "stat", "string", "subprocess", "tarfile"),
    *("tempfile", "threading", "timeit", "tokenize", "trace", "traceback", "tracemalloc", "types", "typing"),
    *("uuid", "warnings", "wave", "weakref", "webbrowser", "zipimport"),
)
HELD_OUT_MODULES = ("sched", "shlex", "statistics", "textwrap")

BOS, EOS, PAD = 256, 257, 258
"""Token ids 0..255 are bytes. 259..271 are reserved, so that the vocabulary divides by 16."""
VOCAB_SIZE = 272


@dataclass(frozen=True)
class Corpus:
    """Token ids of the training and the held-out text, and the digest of both."""

    train: tuple[int, ...]
    held_out: tuple[int, ...]
    digest: str


def load_corpus() -> Corpus:
    """Read the modules in the fixed order above and frame each one as BOS, its bytes, EOS.

    Raises FileNotFoundError naming the module when this Python lacks one as a single file.
    """
    hasher = blake3.blake3()
    train = _frame(TRAIN_MODULES, hasher)
    held_out = _frame(HELD_OUT_MODULES, hasher)
    return Corpus(train=train, held_out=held_out, digest=hasher.hexdigest())


def _frame(modules: tuple[str, ...], hasher: blake3.blake3) -> tuple[int, ...]:
    tokens: list[int] = []
    for module in modules:
        text = (Path(sysconfig.get_path("stdlib")) / f"{module}.py").read_bytes().replace(b"\r\n", b"\n")
        hasher.update(len(module).to_bytes(8, "little") + module.encode())
        hasher.update(len(text).to_bytes(8, "little") + text)
        tokens += [BOS, *text, EOS]
    return tuple(tokens)
