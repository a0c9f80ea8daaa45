"""Importing the libraries that this folder tests with."""

from __future__ import annotations

import importlib

import pytest

# Whether the absence of a library fails, instead of skipping: `conftest.py` sets it before it collects a test.
required = False


def library(name):
    """The module of that name; where it is absent, the tests of the module that asks for it are skipped."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if required:
            raise
        pytest.skip(f'{name}: {error}. pip install -e ".[ecosystem]"', allow_module_level=True)
