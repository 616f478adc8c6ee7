"""A reader of the pickles that `torch.save` writes; nothing in a file can make it run anything.

It is a small stack machine over the opcodes such files hold, not a subclass of `pickle.Unpickler`: five bytes (a memo
index) make the standard one clear gigabytes of memory, and a megabyte of nested tuples as a key ends the process, both
whatever `find_class` allows. Here a memo is a dict, only plain scalars are keys, and what a file may name is a table of
the caller's.

    data ──opcode──> stack, memo ──STOP──> dicts, lists, tuples, sets, str, int, float, bytes, the caller's objects

What grows is bounded by the file: a container costs it at least _BYTES_PER_CONTAINER bytes.
"""

import re
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from rlk_ledger_schemas.errors import FormatError

_BYTES_PER_CONTAINER = 6
_FREE_CONTAINERS = 1000
_LONGEST_INTEGER = 32
_LONGEST_NAME = 120
_COPIED = (list, tuple, set, dict)
_KEYS = (str, int, float, bool, type(None))
_MODULES = {"__builtin__": "builtins"}

# Runs of numbers are most of a dump: they are decoded together.
_RUN = 4096
_INTS = re.compile(rb"(?:K.|M..|J....){8,%d}+" % _RUN, re.DOTALL)
_INT = re.compile(rb"K(.)|M(..)|J(....)", re.DOTALL)
_FLOATS = re.compile(rb"(?:G.{8}){8,%d}+" % _RUN, re.DOTALL)
_FLOAT = np.dtype([("opcode", "u1"), ("value", ">f8")])


class Buildable(ABC):
    """An object of the caller's whose state a file sets after making it (opcode BUILD)."""

    __slots__ = ()

    @abstractmethod
    def build(self, state: Any) -> None:
        """Takes the state; raises FormatError when it is not one."""


class Function:
    """A name a file may call: `call` gets the arguments the file gives. Its attributes cannot be set by a file."""

    __slots__ = ("call", "name")

    def __init__(self, name: str, call: Callable[..., Any]) -> None:
        self.name = name
        self.call = call


class Unlisted(FormatError):
    """A pickle asks for a name that is not on the list; `name` is that name, cut where it is long."""

    def __init__(self, name: str) -> None:
        self.name = name if len(name) <= _LONGEST_NAME else name[:_LONGEST_NAME] + "..."
        super().__init__(f"it asks for {self.name!r}, which no dump needs; it was refused and nothing in it ran.")


def loads(data: bytes, names: Mapping[str, Any], persistent: Callable[[Any], Any]) -> Any:
    """The object a pickle describes.

    `names` maps `module.name` to what it stands for: a `Function`, or any value; every other name is refused.
    `persistent` makes an object of a persistent id. Raises FormatError, one sentence without the file's name.
    """
    machine = _Machine(data, names, persistent)
    try:
        return machine.run()
    except FormatError:
        raise
    except (IndexError, KeyError, ValueError, TypeError, OverflowError, AttributeError, struct.error):
        raise FormatError(f"its pickle is damaged or cut off near byte {machine.at} of {len(data)}.") from None
    except MemoryError:
        raise FormatError("its pickle describes more than fits into memory.") from None


class _Machine:
    """One run over one pickle. `at` is the next byte; `marks` are heights of the stack."""

    def __init__(self, data: bytes, names: Mapping[str, Any], persistent: Callable[[Any], Any]) -> None:
        self.data = data
        self.at = 0
        self.names = names
        self.persistent = persistent
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.room = len(data) // _BYTES_PER_CONTAINER + _FREE_CONTAINERS

    def run(self) -> Any:
        data, table = self.data, _TABLE
        while True:
            opcode = data[self.at]
            self.at += 1
            if opcode == 0x2E:  # STOP
                return self.stack.pop()
            step = table.get(opcode)
            if step is None:
                raise FormatError(
                    f"its pickle holds the opcode {bytes([opcode])!r} at byte {self.at - 1}, which no dump needs."
                )
            step(self)

    def take(self, count: int) -> bytes:
        """The next `count` bytes; raises IndexError past the end."""
        end = self.at + count
        if end > len(self.data):
            raise IndexError
        out = self.data[self.at : end]
        self.at = end
        return out

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "little")

    def line(self) -> str:
        end = self.data.index(b"\n", self.at)
        out = self.data[self.at : end].decode()
        self.at = end + 1
        return out

    def contain(self, value: Any) -> None:
        """Pushes a new container, as long as the file is large enough to hold so many."""
        self.room -= 1
        if self.room < 0:
            raise FormatError("its pickle describes more containers than its size can hold; it is not a dump.")
        self.stack.append(value)

    def marked(self) -> list[Any]:
        """Takes what lies above the last mark."""
        height = self.marks.pop()
        out = self.stack[height:]
        del self.stack[height:]
        return out

    # -- scalars ----------------------------------------------------------------------------------------------------

    def integer(self) -> None:
        """One of BININT1, BININT2, BININT, or a run of them."""
        run = _INTS.match(self.data, self.at - 1)
        if run is None:
            size, signed = {0x4B: (1, False), 0x4D: (2, False), 0x4A: (4, True)}[self.data[self.at - 1]]
            self.stack.append(int.from_bytes(self.take(size), "little", signed=signed))
            return
        whole = run.group()
        if whole[::2].count(b"K") * 2 == len(whole):
            self.stack += whole[1::2]
        else:
            self.stack += [
                one[0] if one else two[0] | two[1] << 8 if two else int.from_bytes(four, "little", signed=True)
                for one, two, four in _INT.findall(whole)
            ]
        self.at = run.end()

    def real(self) -> None:
        """BINFLOAT, or a run of them."""
        run = _FLOATS.match(self.data, self.at - 1)
        if run is None:
            self.stack.append(struct.unpack(">d", self.take(8))[0])
            return
        self.stack += np.frombuffer(run.group(), _FLOAT)["value"].tolist()
        self.at = run.end()

    def long(self) -> None:
        size = self.number(1)
        if size > _LONGEST_INTEGER:
            raise FormatError(f"its pickle holds an integer of {size} bytes, which no dump needs.")
        self.stack.append(int.from_bytes(self.take(size), "little", signed=True))

    def text(self, size: int) -> None:
        self.stack.append(self.take(self.number(size)).decode("utf-8", "surrogatepass"))

    def raw(self, size: int) -> None:
        self.stack.append(self.take(self.number(size)))

    # -- containers -------------------------------------------------------------------------------------------------

    def append(self) -> None:
        value = self.stack.pop()
        self._list().append(value)

    def appends(self) -> None:
        values = self.marked()
        self._list().extend(values)

    def _list(self) -> list[Any]:
        target = self.stack[-1]
        if type(target) is not list:
            raise TypeError
        return target

    def set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._fill([key, value])

    def set_items(self) -> None:
        self._fill(self.marked())

    def _fill(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not dict or len(items) % 2:
            raise TypeError
        target.update(zip(map(_key, items[::2]), items[1::2]))

    def add_items(self) -> None:
        items = self.marked()
        target = self.stack[-1]
        if type(target) is not set:
            raise TypeError
        target.update(map(_key, items))

    def tuple_of(self, count: int) -> None:
        if len(self.stack) - (self.marks[-1] if self.marks else 0) < count:
            raise IndexError
        out = tuple(self.stack[-count:])
        del self.stack[-count:]
        self.contain(out)

    # -- memo, names, calls -----------------------------------------------------------------------------------------

    def put(self, size: int) -> None:
        self.memo[self.number(size)] = self.stack[-1]

    def memoize(self) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def get(self, size: int) -> None:
        self.stack.append(self.memo[self.number(size)])

    def global_name(self) -> None:
        module = self.line()
        self._push_name(module, self.line())

    def stack_global(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self._push_name(module, name)

    def _push_name(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise TypeError
        full = f"{_MODULES.get(module, module)}.{name}"
        if full not in self.names:
            raise Unlisted(full)
        self.stack.append(self.names[full])

    def reduce(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if type(function) is not Function or type(arguments) is not tuple:
            raise TypeError
        copied = sum(len(given) for given in arguments if type(given) in _COPIED)
        self.room -= copied // _BYTES_PER_CONTAINER  # what is copied may have been named, not written out
        self.contain(function.call(*arguments))

    def build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if not isinstance(target, Buildable):
            raise FormatError(f"it sets the state of a {type(target).__name__}, which no dump needs.")
        target.build(state)

    def persistent_id(self) -> None:
        self.stack.append(self.persistent(self.stack.pop()))


def _key(value: Any) -> Any:
    """`value`, when it may be a key: nothing whose hash walks through what a file nests."""
    if type(value) not in _KEYS:
        raise FormatError(f"it uses a {type(value).__name__} as a key, which no dump needs.")
    return value


def as_set(items: Any = ()) -> set[Any]:
    """What `builtins.set` stands for in `names`."""
    return set(map(_key, items))


def as_dict(items: Any = ()) -> dict[Any, Any]:
    """What `collections.OrderedDict` stands for in `names`: a dict, which keeps its order too."""
    return {_key(key): value for key, value in items}


_STEPS: dict[bytes, Callable[[_Machine], Any]] = {
    b"\x80": lambda m: m.take(1),  # PROTO
    b"\x95": lambda m: m.take(8),  # FRAME
    b"(": lambda m: m.marks.append(len(m.stack)),
    b"0": lambda m: m.stack.pop(),
    b"1": _Machine.marked,
    b"N": lambda m: m.stack.append(None),
    b"\x88": lambda m: m.stack.append(True),
    b"\x89": lambda m: m.stack.append(False),
    b"K": _Machine.integer,
    b"M": _Machine.integer,
    b"J": _Machine.integer,
    b"\x8a": _Machine.long,
    b"G": _Machine.real,
    b"X": lambda m: m.text(4),
    b"\x8c": lambda m: m.text(1),
    b"\x8d": lambda m: m.text(8),
    b"C": lambda m: m.raw(1),
    b"B": lambda m: m.raw(4),
    b"]": lambda m: m.contain([]),
    b"a": _Machine.append,
    b"e": _Machine.appends,
    b"}": lambda m: m.contain({}),
    b"s": _Machine.set_item,
    b"u": _Machine.set_items,
    b"\x8f": lambda m: m.contain(set()),
    b"\x90": _Machine.add_items,
    b")": lambda m: m.stack.append(()),
    b"t": lambda m: m.contain(tuple(m.marked())),
    b"\x85": lambda m: m.tuple_of(1),
    b"\x86": lambda m: m.tuple_of(2),
    b"\x87": lambda m: m.tuple_of(3),
    b"q": lambda m: m.put(1),
    b"r": lambda m: m.put(4),
    b"\x94": _Machine.memoize,
    b"h": lambda m: m.get(1),
    b"j": lambda m: m.get(4),
    b"c": _Machine.global_name,
    b"\x93": _Machine.stack_global,
    b"R": _Machine.reduce,
    b"b": _Machine.build,
    b"Q": _Machine.persistent_id,
}
"""The opcodes of protocols 2 to 5 that a dump of plain data and tensors holds."""

_TABLE = {name[0]: step for name, step in _STEPS.items()}
