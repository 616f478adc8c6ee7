"""Files written by `torch.save`, without torch: a zip of one pickle and one member a storage.

    with TorchFile(path) as file:
        file.value["samples"][0]["log_probs"].numpy()

Tensors stay where they are until `numpy()` asks: a dump full of pixels costs nothing. What a file declares (shapes,
strides, storage sizes) is checked against the bytes it has before anything is allocated.
"""

import math
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from rlk_ledger.importers import pickles
from rlk_ledger.importers.extent import check_extent
from rlk_ledger.importers.numpy_pickles import NUMPY_NAMES
from rlk_ledger.importers.pickles import Function
from rlk_ledger_schemas.errors import FormatError

_LARGEST_REPEATED = 1 << 20
"""Elements a tensor may have beyond those of its storage (an expanded tensor repeats elements)."""
_LARGEST_BARE_PICKLE = 16 << 20
_MAX_DIMENSIONS = 16
_STORAGES_KEPT = 4

# torch dtype -> (numpy dtype of its little-endian bytes, whether those are the upper half of a float32)
_DTYPES: dict[str, tuple[str, bool]] = {
    "float64": ("<f8", False),
    "float32": ("<f4", False),
    "float16": ("<f2", False),
    "bfloat16": ("<u2", True),
    "int64": ("<i8", False),
    "int32": ("<i4", False),
    "int16": ("<i2", False),
    "int8": ("|i1", False),
    "uint8": ("|u1", False),
    "bool": ("|b1", False),
    "uint16": ("<u2", False),
    "uint32": ("<u4", False),
    "uint64": ("<u8", False),
}
_STORAGE_TYPES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
}


class DType:
    """A torch dtype a file names; `name` is None for storages that are bytes."""

    __slots__ = ("name",)

    def __init__(self, name: str | None) -> None:
        self.name = name


class Storage:
    """A storage a file names: where its bytes are, how many, and the dtype the storage itself declares, if any."""

    __slots__ = ("dtype", "key", "size")

    def __init__(self, key: str, dtype: str | None, size: int) -> None:
        self.key = key
        self.dtype = dtype
        self.size = size


class Tensor:
    """A tensor of a file: its geometry, checked, and where its bytes are. A stride that no element needs is 0."""

    __slots__ = ("_file", "dtype", "offset", "shape", "storage", "strides")

    def __init__(
        self, file: "TorchFile", storage: Storage, dtype: str, offset: int, shape: tuple[int, ...], strides: Any
    ) -> None:
        self._file = file
        self.storage = storage
        self.dtype = dtype
        self.offset = offset
        self.shape = shape
        self.strides = strides

    def numpy(self) -> npt.NDArray[Any]:
        """Its elements as a read-only array; bfloat16 widens exactly to float32. Raises FormatError."""
        code, widens = _DTYPES[self.dtype]
        flat = np.frombuffer(self._file.storage(self.storage), code)
        strides = [stride * flat.itemsize for stride in self.strides]
        view = np.lib.stride_tricks.as_strided(flat[self.offset :], self.shape, strides, writeable=False)
        if not widens:
            return view
        bits = view.astype(np.uint32)
        return np.left_shift(bits, 16, out=bits).view(np.float32)


class TorchFile:
    """An open file of `torch.save`; `value` is what was saved, tensors as `Tensor`. Raises FormatError, OSError."""

    def __init__(self, path: Path, stream: IO[bytes] | None = None) -> None:
        self._path = path
        self._stream = path.open("rb") if stream is None else stream
        self._kept: dict[str, bytes] = {}
        try:
            self._zip, self._root = _opened(self._stream)
            _check_byte_order(self._member("byteorder", missing=b"little"))
            self.value = pickles.loads(self._member("data.pkl"), self._names(), self._persistent)
            check_extent(self.value, self._stream.seek(0, 2))
        except BaseException:
            self._stream.close()
            raise

    def __enter__(self) -> "TorchFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.close()

    def storage(self, storage: Storage) -> bytes:
        """The bytes of a storage, their checksum checked."""
        if storage.key not in self._kept:
            while len(self._kept) >= _STORAGES_KEPT:
                del self._kept[next(iter(self._kept))]
            self._kept[storage.key] = self._member(f"data/{storage.key}")
        return self._kept[storage.key]

    def _member(self, name: str, missing: bytes | None = None) -> bytes:
        try:
            return self._zip.read(f"{self._root}{name}")
        except KeyError:
            if missing is not None:
                return missing
            raise FormatError(f"its member `{name}` is missing.") from None
        except (zipfile.BadZipFile, EOFError, OSError, RuntimeError, ValueError, NotImplementedError):
            raise FormatError(f"its member `{name}` is damaged or cut off.") from None

    def _names(self) -> Mapping[str, Any]:
        return {
            **_PLAIN_NAMES,
            "torch._utils._rebuild_tensor_v2": Function("_rebuild_tensor_v2", self._rebuild),
            "torch._utils._rebuild_tensor_v3": Function("_rebuild_tensor_v3", self._rebuild_as),
            "torch._utils._rebuild_parameter": Function("_rebuild_parameter", _parameter),
        }

    def _persistent(self, saved: Any) -> Storage:
        """The storage of a persistent id: ("storage", type, key, location, number of elements)."""
        if type(saved) is not tuple or len(saved) != 5 or saved[0] != "storage" or type(saved[1]) is not DType:
            raise FormatError("it refers to an object outside it that is no storage.")
        _, kind, key, _, count = saved
        if type(key) is not str or re.fullmatch(r"[0-9]{1,12}", key) is None or type(count) is not int or count < 0:
            raise FormatError("it names a storage by something that is no number.")
        try:
            size = self._zip.getinfo(f"{self._root}data/{key}").file_size
        except KeyError:
            raise FormatError(f"its member `data/{key}` is missing.") from None
        width = 1 if kind.name is None else np.dtype(_DTYPES[kind.name][0]).itemsize
        if count * width != size:
            raise FormatError(f"storage {key} claims {count * width} bytes and has {size}.")
        return Storage(key, kind.name, size)

    def _rebuild(
        self,
        storage: Any,
        offset: Any,
        shape: Any,
        strides: Any,
        _grad: Any = None,
        _hooks: Any = None,
        _extra: Any = None,
    ) -> Tensor:
        if type(storage) is not Storage or storage.dtype is None:
            raise FormatError("it makes a tensor of something that is no storage.")
        return self._tensor(storage, storage.dtype, offset, shape, strides)

    def _rebuild_as(
        self,
        storage: Any,
        offset: Any,
        shape: Any,
        strides: Any,
        _grad: Any,
        _hooks: Any,
        dtype: Any,
        _extra: Any = None,
    ) -> Tensor:
        if type(storage) is not Storage or type(dtype) is not DType or dtype.name is None:
            raise FormatError("it makes a tensor of something that is no storage.")
        return self._tensor(storage, dtype.name, offset, shape, strides)

    def _tensor(self, storage: Storage, dtype: str, offset: Any, shape: Any, strides: Any) -> Tensor:
        """Checks that every element lies inside the storage; raises FormatError."""
        sizes = (offset, *shape, *strides)
        if len(shape) != len(strides) or len(shape) > _MAX_DIMENSIONS:
            raise FormatError("it makes a tensor whose shape and strides do not fit each other.")
        if any(type(n) is not int or n < 0 for n in sizes):
            raise FormatError("it makes a tensor with a size or stride that is no whole number.")
        held = storage.size // np.dtype(_DTYPES[dtype][0]).itemsize
        count = math.prod(shape)
        last = offset + sum((n - 1) * stride for n, stride in zip(shape, strides)) if count else offset
        if last >= held + (not count):
            raise FormatError(
                f"it makes a tensor of shape {tuple(shape)} from storage {storage.key}, which has {held} elements."
            )
        if math.prod(max(n, 1) for n in shape) > held + _LARGEST_REPEATED:
            raise FormatError(
                f"it makes a tensor of shape {tuple(shape)} by repeating the {held} elements of storage {storage.key}."
            )
        used = tuple(stride if n > 1 and count else 0 for n, stride in zip(shape, strides))
        return Tensor(self, storage, dtype, offset, tuple(shape), used)


def _parameter(data: Any, _grad: Any = None, _hooks: Any = None) -> Tensor:
    if type(data) is not Tensor:
        raise FormatError("it makes a parameter of something that is no tensor.")
    return data


def _size(items: Any = ()) -> tuple[Any, ...]:
    return tuple(items)


def _opened(stream: IO[bytes]) -> tuple[zipfile.ZipFile, str]:
    """The zip and the folder all its members are in; raises FormatError for what torch.save does not write."""
    head = stream.read(2)
    if head[:1] == b"\x80":
        raise _bare_pickle(head + stream.read(_LARGEST_BARE_PICKLE))
    try:
        archive = zipfile.ZipFile(stream)
        members = archive.infolist()
    except (zipfile.BadZipFile, EOFError, OSError, RuntimeError, ValueError, NotImplementedError, OverflowError):
        what = "is cut off or damaged" if head == b"PK" else "is no file of torch.save"
        raise FormatError(f"it {what}: it has no readable zip directory.") from None
    if any(m.compress_type != zipfile.ZIP_STORED or m.file_size != m.compress_size for m in members):
        raise FormatError("its members are compressed, which torch.save never does.")
    if sum(m.file_size for m in members) > stream.seek(0, 2):
        raise FormatError("its members claim more bytes than the file has.")
    if len({m.filename for m in members}) != len(members):
        raise FormatError("it holds two members of one name.")
    roots = [m.filename.removesuffix("data.pkl") for m in members if m.filename.rpartition("/")[2] == "data.pkl"]
    if len(roots) != 1:
        raise FormatError("it is a zip file, but not one that torch.save writes: it has no single `data.pkl`.")
    return archive, roots[0]


def _bare_pickle(data: bytes) -> FormatError:
    """Why a file that is no zip is refused: what its pickle asks for, if anything; it is never taken."""
    asks = ""
    try:
        pickles.loads(data, _PLAIN_NAMES, persistent=lambda saved: None)
    except pickles.Unlisted as unlisted:
        asks = f", and asks for {unlisted.name!r}"
    except FormatError:
        pass
    what = "it is a bare pickle, not the zip file that torch.save writes"
    return FormatError(f"{what}{asks}; it was refused and nothing in it ran.")


def _check_byte_order(order: bytes) -> None:
    if order != b"little":
        raise FormatError(f"its byte order is {order[:20]!r}; only little-endian files are read.")


_PLAIN_NAMES: dict[str, Any] = {
    "collections.OrderedDict": Function("OrderedDict", pickles.as_dict),
    "builtins.set": Function("set", pickles.as_set),
    "torch.Size": Function("Size", _size),
    "torch.storage.UntypedStorage": DType(None),
    **{f"torch.{name}": DType(dtype) for name, dtype in _STORAGE_TYPES.items()},
    **{f"torch.{name}": DType(name) for name in _DTYPES},
    **NUMPY_NAMES,
}
