"""What the package costs, as ratios in one run: `python python/bench.py` where flashboot and torch are installed.

- bind: `flashboot.torch.bind` of 11,000 tensors, against creating as many views and Parameters by hand (wanted: at most 1.5);
- import: `import flashboot` against importing an empty extension of the same kind (at most 1.5 times, and 10 ms);
- load: the wall time of `flashboot.load` against what the library says it took (at most 1.02).

Each is the best of several rounds, taken in turns (load: the median); bind and import in processor time, which a busy machine disturbs less. The empty extension is compiled with the C compiler.
"""

import argparse
import json
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

TENSORS = 11_000
EMPTY = """
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
static struct PyModuleDef def = {PyModuleDef_HEAD_INIT, "_empty", 0, -1, 0};
PyMODINIT_FUNC PyInit__empty(void) { return PyModule_Create(&def); }
"""
TIMED = "import time; t = time.process_time(); import {0}; print(time.process_time() - t)"


def best(rounds, *works, clock=time.perf_counter):
    """The least time of each, in turns."""
    times = [[] for _ in works]
    for _ in range(rounds):
        for work, took in zip(works, times):
            began = clock()
            value = work()
            took.append(value if isinstance(value, float) else clock() - began)
    return [min(took) for took in times]


def bind(folder, rounds):
    import torch

    import flashboot
    import flashboot.torch

    def make():
        # Layers of ten, so that names are as long and modules as many as in a mixture of experts.
        def layer():
            made = torch.nn.Module()
            for i in range(10):
                made.register_parameter(f"weight_{i}", torch.nn.Parameter(torch.ones(8, 8), requires_grad=False))
            return made

        return torch.nn.ModuleList(layer() for _ in range(TENSORS // 10))

    flashboot.torch.capture(make(), folder / "many")
    arena = flashboot.load(folder / "many")
    with torch.device("meta"):
        models = [make() for _ in range(rounds)]
    entries = [(t.offset // 4, t.shape, t.stride) for t in arena.tensors()]

    def by_hand():
        storage, kept = torch.from_dlpack(arena).untyped_storage(), []
        for offset, shape, stride in entries:
            view = torch.empty(0, dtype=torch.float32).set_(storage, offset, shape, stride)
            kept.append(torch.nn.Parameter(view, requires_grad=False))

    bound = iter(models)
    ours, theirs = best(rounds, lambda: flashboot.torch.bind(next(bound), arena) and None, by_hand, clock=time.process_time)
    return {"bind_ms": ours * 1e3, "by_hand_ms": theirs * 1e3, "ratio": ours / theirs, "wanted": 1.5}


def imports(folder, rounds):
    (folder / "_empty.c").write_text(EMPTY)
    include = sysconfig.get_path("include")
    command = ["cc", "-shared", "-fPIC", f"-I{include}", str(folder / "_empty.c"), "-o", str(folder / "_empty.abi3.so")]
    subprocess.run(command, check=True)

    def imported(name):
        done = subprocess.run(
            [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(folder)!r}); " + TIMED.format(name)],
            check=True, capture_output=True, text=True,
        )
        return float(done.stdout)

    ours, empty = best(rounds, lambda: imported("flashboot"), lambda: imported("_empty"))
    return {"import_ms": ours * 1e3, "empty_ms": empty * 1e3, "wanted_ms": empty * 1.5e3 + 10}


def load(folder, rounds, mebibytes):
    import torch

    import flashboot
    import flashboot.torch

    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.zeros(mebibytes, 1 << 20, dtype=torch.uint8), requires_grad=False)
    flashboot.torch.capture(model, folder / "large")
    ratios = []
    for _ in range(rounds):
        began = time.perf_counter()
        arena = flashboot.load(folder / "large")
        wall = (time.perf_counter() - began) * 1e3
        ratios.append((wall / arena.report["engine_visible_ms"], wall))
        del arena
    ratios.sort()
    ratio, wall = ratios[len(ratios) // 2]
    return {"wall_ms": wall, "mebibytes": mebibytes, "ratio": ratio, "wanted": 1.02}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--mebibytes", type=int, default=1024)
    wanted = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="flashboot-bench-"))
    try:
        found = {
            "import": imports(folder, wanted.rounds * 3),
            "bind": bind(folder, wanted.rounds),
            "load": load(folder, wanted.rounds, wanted.mebibytes),
        }
    finally:
        shutil.rmtree(folder)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
