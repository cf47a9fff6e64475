"""The command that the package brings: the program itself, by `flashboot` and by `python -m flashboot`."""

import json
import os
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

import flashboot
import flashboot.torch

BY_MODULE = [sys.executable, "-m", "flashboot"]
BY_NAME = [str(Path(sysconfig.get_path("scripts")) / "flashboot")]


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    return flashboot.torch.capture(torch.nn.Linear(256, 256), tmp_path_factory.mktemp("command") / "image")


def run(command, *arguments):
    return subprocess.run([*command, *map(str, arguments)], capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize("command", [BY_NAME, BY_MODULE])
def test_it_is_the_program(command, image):
    said = run(command, "--version")
    assert said.returncode == 0 and said.stdout.strip() == f"flashboot {flashboot.__version__}"
    said = run(command, "verify", image.path, "--json")
    assert said.returncode == 0 and json.loads(said.stdout)["id"] == image.id
    said = run(command, "no-such-verb")
    assert said.returncode == 2 and "no-such-verb" in said.stderr and "Traceback" not in said.stderr
    said = run(command, "inspect", image.path / "nowhere", "--json")
    assert said.returncode == 3 and json.loads(said.stdout)["error"]["kind"] == "unavailable"


def test_ranks_that_are_processes_begin_by_it_too(image):
    said = run(BY_MODULE, "replicate", image.path, "--clones", 2, "--json")
    assert said.returncode == 0, said.stderr
    report = json.loads(said.stdout)
    assert [clone["verified"] for clone in report["clones"]] == [1, 1] and report["transport"] == "ipc"


def test_a_signal_ends_it_with_a_word_and_without_a_traceback(tmp_path):
    for number in (signal.SIGINT, signal.SIGTERM):
        serving = subprocess.Popen(
            [*BY_MODULE, "rendezvous", "--listen", "127.0.0.1:0", "--json"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
        )
        assert json.loads(serving.stdout.readline())
        serving.send_signal(number)
        _, said = serving.communicate(timeout=120)
        assert "Traceback" not in said and "KeyboardInterrupt" not in said
        assert serving.returncode in (0, 1)


def test_what_lies_in_the_working_directory_is_not_taken_for_it(image, tmp_path):
    (tmp_path / "flashboot.py").write_text("raise SystemExit(77)")
    said = subprocess.run(
        [*BY_NAME, "replicate", str(image.path), "--clones", "1", "--json"],
        capture_output=True, text=True, timeout=240, cwd=tmp_path,
    )
    assert said.returncode == 0, said.stderr
    assert os.listdir(tmp_path) == ["flashboot.py"]
