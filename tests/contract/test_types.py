"""Pyright accepts right calls of users, and reports wrong ones."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

CALLS = Path(__file__).with_name("typed_calls.py")


@pytest.mark.pyright
def test_pyright_refuses_the_wrong_calls_and_no_others(framework, tmp_path):
    framework("pyright")
    text = CALLS.read_text()
    (tmp_path / CALLS.name).write_text(text)
    # The settings of a user who has set none, not those of this package.
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(CALLS.parents[2])]}))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    found = json.loads(result.stdout)["generalDiagnostics"]
    refused = {(x["range"]["start"]["line"] + 1, x.get("rule", x["message"])) for x in found}
    expected = {
        (number, match[1])
        for number, line in enumerate(text.splitlines(), start=1)
        if (match := re.search(r"  # error: (\w+)$", line))
    }
    assert len(expected) > 20
    assert refused == expected, found
