"""Tensors in files: a folder for each process, and a file for each tensor, with its checksum.

NOTE [folders of dead processes]
A process that is killed cannot remove its files. Each process therefore keeps a lock on its folder, which the operating
system releases with the process, however it ends. Whoever makes a folder in the same directory removes the folders that
nobody locks. A folder gets its name only after it is locked. Where locks do not work, nothing is removed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
import weakref
import zlib
from typing import Any

import numpy as np

try:
    import fcntl
except ImportError:  # Windows, where the files of a killed process stay
    fcntl = None

_PREFIX = "saved_tensors-"


class Folder:
    """A folder of this process in the directory of the user; removed when no hooks and no files use it."""

    def __init__(self, directory: str) -> None:
        try:
            os.makedirs(directory, exist_ok=True)
            for name in os.listdir(directory):
                old = os.path.join(directory, name)
                if name.startswith(_PREFIX) and (lock := _locked(old)) is not None:
                    _remove(old, lock)
            made = tempfile.mkdtemp(prefix=".", dir=directory)
            lock = _locked(made)
            self.path = os.path.join(directory, _PREFIX + os.path.basename(made)[1:])
            os.rename(made, self.path)
        except OSError as error:
            raise _unwritable_error(error, directory, "a folder") from error
        weakref.finalize(self, _in_process, os.getpid(), _remove, self.path, lock)


class File:
    """One tensor in a file; the file is removed with this object.

    Raises:
        OSError: if it cannot be written; the unfinished file is removed.
    """

    __slots__ = ("__weakref__", "_checksum", "_dtype", "_folder", "_path", "_shape")

    def __init__(self, folder: Folder, x: np.ndarray) -> None:
        self._folder = folder  # which lives as long as its files
        self._shape, self._dtype = x.shape, x.dtype
        content = np.ascontiguousarray(x).reshape(-1).view(np.uint8).data
        self._checksum = zlib.crc32(content)
        try:
            handle, self._path = tempfile.mkstemp(dir=folder.path)
            weakref.finalize(self, _in_process, os.getpid(), _unlink, self._path)
            with os.fdopen(handle, "wb") as file:
                file.write(content)
        except OSError as error:
            raise _unwritable_error(error, folder.path, f"{x.nbytes} bytes") from error

    def read(self) -> np.ndarray:
        """The tensor.

        Raises:
            OSError: if the file was deleted or changed, or cannot be read.
        """
        number, what = None, "holds other bytes than those that were written"
        try:
            content = np.fromfile(self._path, dtype=np.uint8)
            if zlib.crc32(content.data) == self._checksum:
                return content.view(self._dtype).reshape(self._shape)
        except OSError as error:
            number, what = error.errno, f"cannot be read ({error.strerror})"
        raise OSError(
            number,
            f"save_on_disk: the file of a tensor of dtype {self._dtype} and shape {self._shape} {what}. Something else "
            "changed it; give save_on_disk a directory of its own",
            self._path,
        )


_folders: weakref.WeakValueDictionary[str, Folder] = weakref.WeakValueDictionary()
_folders_lock = threading.RLock()  # a finalizer may make a folder at any line


def folder_of(directory: str) -> Folder:
    """The folder of this process in a directory; one for all hooks that use the directory."""
    with _folders_lock:
        return _folders.get(directory) or _folders.setdefault(directory, Folder(directory))


def _locked(folder: str) -> int | None:
    """A locked descriptor of a folder; None if nobody can lock it, or if another process has locked it."""
    if fcntl is None:
        return None
    descriptor = None
    try:
        descriptor = os.open(folder, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        if descriptor is not None:
            os.close(descriptor)
        return None
    return descriptor


def _remove(folder: str, lock: int | None) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    if lock is not None:
        os.close(lock)


def _unlink(path: str) -> None:
    with contextlib.suppress(OSError):  # the folder may have been removed before
        os.unlink(path)


def _in_process(process: int, remove: Any, *args: Any) -> None:
    if os.getpid() == process:  # a forked process inherits the finalizers, but the files belong to its parent
        remove(*args)


def _unwritable_error(error: OSError, directory: str, what: str) -> OSError:
    advice = "Choose a directory that is writable and has room"
    return OSError(error.errno, f"save_on_disk could not write {what} ({error.strerror}). {advice}", directory)
