"""Strip notebooks of what differs from machine to machine: python -m notebooks.tools.clean_notebooks FILE..."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
# Folders of a machine, up to the name of the file: "/home/me/project/model.py" is shown as "model.py".
FOLDERS = re.compile(r"(?<![\w:/.])/(?:home|root|tmp|usr|Users)/(?:[^\s\"'/:,)]+/)*")


def cleaned(notebook: dict[str, Any]) -> dict[str, Any]:
    """Return the notebook with the metadata of any machine, no times of execution, and no folders in its outputs."""
    cells = [dict(cell) for cell in notebook["cells"]]
    for cell in cells:
        cell["metadata"] = {k: v for k, v in cell["metadata"].items() if k not in ("execution", "ExecuteTime")}
        if "outputs" in cell:
            cell["outputs"] = joined([without_folders(output) for output in cell["outputs"]])
    return notebook | {"cells": cells, "metadata": METADATA}


def joined(outputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the outputs with one text for what was printed at several times, without empty texts and progress bars."""
    found: list[dict[str, Any]] = []
    for output in outputs:
        if output.get("name") == "stderr" and "\r" in "".join(output["text"]):
            continue
        if output["output_type"] == "stream":
            text = output["text"] if isinstance(output["text"], list) else output["text"].splitlines(keepends=True)
            if found and found[-1].get("name") == output["name"]:
                found[-1]["text"] += text
            elif "".join(text).strip():
                found.append(output | {"text": list(text)})
        else:
            found.append(output)
    return found


def without_folders(value: Any) -> Any:
    """Return an output of which every text has lost its folders; pictures stay as they are."""
    if isinstance(value, str):
        return FOLDERS.sub("", value)
    if isinstance(value, list):
        return [without_folders(v) for v in value]
    if isinstance(value, dict):
        return {k: v if k.startswith("image/") else without_folders(v) for k, v in value.items()}
    return value


def main(files: list[str]) -> int:
    """Clean the files in place. Return 1 if any has changed, as a hook of pre-commit does."""
    changed = False
    for file in map(Path, files):
        notebook = json.loads(file.read_text())
        if (clean := cleaned(notebook)) != notebook:
            file.write_text(json.dumps(clean, indent=1, ensure_ascii=False) + "\n")
            changed = True
    return int(changed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
