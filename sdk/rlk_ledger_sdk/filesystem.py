"""Which file system a spool directory is on, and how a file there may be written."""

import ctypes
import os
from typing import Literal

Method = Literal["mmap", "pwrite"]

# statfs(2) magic numbers. A preallocated file on these keeps every block it was promised, so a store through a
# mapping cannot hit a full disk.
_MAPPABLE = {0xEF53: "ext4", 0x58465342: "xfs", 0x01021994: "tmpfs"}
_NETWORK = {
    0x6969: "nfs",
    0x65735546: "fuse",
    0x517B: "smb",
    0xFF534D42: "cifs",
    0xFE534D42: "smb2",
    0x00C36400: "ceph",
    0x0BD00BD0: "lustre",
    0x47504653: "gpfs",
    0x5346414F: "afs",
    0x01021997: "9p",
    0x19830326: "beegfs",
}
_COPYING = {0x794C7630: "overlay", 0x9123683E: "btrfs", 0x2FC12FC1: "zfs", 0xF2F52010: "f2fs", 0xCA451A4E: "bcachefs"}


def name_of(path: str) -> str:
    """The file system of `path`: ext4, xfs, tmpfs, overlay, nfs, ... or `unknown`."""
    magic = _magic(path)
    for table in (_MAPPABLE, _NETWORK, _COPYING):
        if magic in table:
            return table[magic]
    return "unknown"


def is_network(name: str) -> bool:
    """Whether `name` is a file system whose locks and cache a spool cannot trust."""
    return name in _NETWORK.values()


def method_for(name: str) -> Method:
    """How files on file system `name` are written: `mmap` only where a full disk cannot turn a store into SIGBUS."""
    return "mmap" if name in _MAPPABLE.values() else "pwrite"


def _magic(path: str) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    block = (ctypes.c_long * 32)()  # struct statfs begins with f_type, a long on Linux
    if libc.statfs(os.fsencode(path), ctypes.byref(block)) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), path)
    return int(block[0]) & 0xFFFFFFFF
