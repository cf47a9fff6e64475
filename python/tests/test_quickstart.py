"""The quickstart runs from the top to the bottom; what of it does not says why."""

import os
import re
import socket
import subprocess
import sys
import sysconfig
from pathlib import Path

DOCUMENT = Path(__file__).parents[2] / "docs" / "quickstart.md"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def test_every_block_that_can_run_runs_in_order(tmp_path_factory):
    # Sockets have at most 107 bytes of path.
    place = tmp_path_factory.mktemp("q")
    script = ["set -eu", "trap 'kill $(jobs -p) 2> /dev/null; wait' EXIT"]
    for language, text in BLOCK.findall(DOCUMENT.read_text()):
        if language == "sh":
            script.append(text)
        elif language == "python":
            script.append(f"{sys.executable} <<'THE END'\n{text}THE END")
    assert len(script) > 8
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", "\n".join(script)],
        cwd=place, env={**os.environ, "PATH": path, "PORT": str(port)},
        capture_output=True, text=True, timeout=600,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    assert (place / "clone.img").read_bytes() == (place / "model.image" / "target-0-0-0-0.img").read_bytes()


def test_what_is_not_run_says_why():
    text = DOCUMENT.read_text()
    for block in BLOCK.finditer(text):
        if block[1] in ("sh", "python"):
            continue
        section = text[: block.start()].rpartition("\n## ")[2]
        assert "Not run" in section, f"a block of {block[1]} that is not run does not say why:\n{block[2]}"
