"""The documentation's Python runs as it stands."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def blocks(path):
    return re.findall(r"^```python\n(.*?)^```$", path.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("document", ["docs/python.md", "README.md"])
def test_every_block_runs(document, tmp_path, monkeypatch, capsys):
    found = blocks(ROOT / document)
    assert found, f"{document} has no Python"
    monkeypatch.chdir(tmp_path)
    names = {}
    for number, block in enumerate(found, 1):
        exec(compile(block, f"{document}, block {number}", "exec"), names)
