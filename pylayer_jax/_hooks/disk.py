"""Tensors in files: a folder for each process, and a file for each tensor, with its checksum.

NOTE [folders of dead processes]
A process that is killed cannot remove its files. Each process therefore keeps a lock on its folder, which the operating
system releases with the process, however it ends. Whoever makes a folder in the same directory removes the folders that
nobody locks. A folder gets its name only after it is locked. Where locks do not work, nothing is removed.
"""

from __future__ import annotations

import contextlib
import math
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
        self._directory = directory
        self._lock = threading.Lock()
        self.path = ""
        self._make()

    def _make(self) -> None:
        try:
            os.makedirs(self._directory, exist_ok=True)
            _remove_folders_of_dead_processes(self._directory)
            made = tempfile.mkdtemp(prefix=".", dir=self._directory)
            lock = _locked(made)
            self.path = os.path.join(self._directory, _PREFIX + os.path.basename(made)[1:])
            os.rename(made, self.path)
        except OSError as error:
            raise _unwritable_error(error, self._directory, "a folder") from error
        weakref.finalize(self, _in_process(os.getpid(), _remove), self.path, lock)

    def write(self, x: np.ndarray) -> File:
        """Write a tensor to a new file.

        Raises:
            OSError: if it cannot be written; the unfinished file is removed.
        """
        content = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
        with self._lock:
            if not os.path.isdir(self.path):  # something removed it, and the tensors in it
                self._make()
        temporary = ""
        try:
            handle, temporary = tempfile.mkstemp(suffix=".part", dir=self.path)
            with os.fdopen(handle, "wb") as file:
                file.write(content.data)
            path = temporary.removesuffix(".part")
            os.replace(temporary, path)
        except OSError as error:
            if temporary:
                _unlink(temporary)
            raise _unwritable_error(error, self.path, f"{x.nbytes} bytes") from error
        return File(self, path, x.shape, x.dtype, zlib.crc32(content.data))


class File:
    """One tensor in a file; the file is removed with this object."""

    __slots__ = ("__weakref__", "_checksum", "_dtype", "_folder", "_shape", "path")

    def __init__(self, folder: Folder, path: str, shape: tuple[int, ...], dtype: np.dtype, checksum: int) -> None:
        self._folder = folder  # which lives as long as its files
        self.path = path
        self._shape = shape
        self._dtype = dtype
        self._checksum = checksum
        weakref.finalize(self, _in_process(os.getpid(), _unlink), path)

    def read(self) -> np.ndarray:
        """The tensor.

        Raises:
            OSError: if the file was deleted or changed, or cannot be read.
        """
        try:
            content = np.fromfile(self.path, dtype=np.uint8)
        except OSError as error:
            what = "was deleted" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
            raise self._error(what, error.errno) from error
        expected = math.prod(self._shape) * self._dtype.itemsize
        if content.size != expected:
            raise self._error(f"holds {content.size} bytes, but {expected} were written")
        if zlib.crc32(content.data) != self._checksum:
            raise self._error("holds other bytes than those that were written")
        return content.view(self._dtype).reshape(self._shape)

    def _error(self, what: str, number: int | None = None) -> OSError:
        message = (
            f"save_on_disk: the file of a tensor of dtype {self._dtype} and shape {self._shape} {what}. Something else "
            "changed it; give save_on_disk a directory of its own"
        )
        return OSError(number, message, self.path)


_folders: weakref.WeakValueDictionary[str, Folder] = weakref.WeakValueDictionary()
_folders_lock = threading.Lock()


def folder_of(directory: str) -> Folder:
    """The folder of this process in a directory; one for all hooks that use the directory."""
    with _folders_lock:
        folder = _folders.get(directory)
        if folder is None:
            folder = _folders[directory] = Folder(directory)
        return folder


def _locked(folder: str) -> int | None:
    """A locked descriptor of a folder; None if nobody can lock it, or if another process has locked it."""
    if fcntl is None:
        return None
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _remove_folders_of_dead_processes(directory: str) -> None:
    for name in os.listdir(directory):
        folder = os.path.join(directory, name)
        with contextlib.suppress(OSError):  # another process may remove it at the same time
            if name.startswith(_PREFIX) and (lock := _locked(folder)) is not None:
                _remove(folder, lock)


def _remove(folder: str, lock: int | None) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    if lock is not None:
        os.close(lock)


def _unlink(path: str) -> None:
    with contextlib.suppress(OSError):  # the folder may have been removed before
        os.unlink(path)


def _in_process(process: int, action: Any) -> Any:
    # A forked process inherits the finalizers, but the files belong to its parent.
    return lambda *args: action(*args) if os.getpid() == process else None


def _unwritable_error(error: OSError, directory: str, what: str) -> OSError:
    return OSError(
        error.errno,
        f"save_on_disk could not write {what} ({error.strerror}). Choose a directory that is writable and has room; no "
        "tensor was lost, and those saved before stay readable",
        directory,
    )
