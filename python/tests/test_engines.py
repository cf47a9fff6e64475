"""Our load format in the engines' own code, on the CPU, one rank; each engine in a process of its own.

Needs the engines' packages, which the suite installs beside the environment and names in FLASHBOOT_CONFORMANCE_ENGINES.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).parent / "engines"
PACKAGES = os.environ.get("FLASHBOOT_CONFORMANCE_ENGINES")


def claims(script):
    """The names of a script's cases, without running it; of families both."""
    names = []
    for line in (CASES / script).read_text().splitlines():
        line = line.strip()
        if line.startswith("@cases("):
            name = line.removeprefix("@cases(").removesuffix(")")
            for family in ("llama", "qwen3_moe"):
                names.append(name.removeprefix("f").strip('"').replace("{name}", family))
    return list(dict.fromkeys(names))


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What became of an engine's cases, run once."""
    kept = {}

    def run(script):
        if script not in kept:
            folder = tmp_path_factory.mktemp("engines")
            command = [sys.executable, str(CASES / script), str(folder)]
            env = {**os.environ, "PYTHONPATH": PACKAGES, "HOME": str(folder), "OMP_NUM_THREADS": "1"}
            # What importing the engines takes is mostly compiling them, and what vLLM found out of its models: kept beside them.
            env.pop("PYTHONDONTWRITEBYTECODE", None)
            env |= {"PYTHONPYCACHEPREFIX": f"{PACKAGES}/.bytecode", "VLLM_CACHE_ROOT": f"{PACKAGES}/.vllm"}
            done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=env)
            last = done.stdout.strip().splitlines()[-1:] or [""]
            assert last[0].startswith("{"), f"{script} ended with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
            kept[script] = json.loads(last[0])
        return kept[script]

    return run


@pytest.mark.skipif(not PACKAGES, reason="needs the engines' packages")
@pytest.mark.parametrize(
    ("script", "claim"),
    [(script, claim) for script in ("vllm_cases.py", "sglang_cases.py") for claim in claims(script)],
)
def test_in_the_engines_own_code(found, script, claim):
    became = found(script)[claim]
    assert became == "ok", became
