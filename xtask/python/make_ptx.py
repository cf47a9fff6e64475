"""Compiles a CUDA source to PTX with NVRTC: `make_ptx.py SOURCE PTX`.

NVRTC comes from the wheel nvidia-cuda-nvrtc-cu12 of the Python that runs this; no CUDA toolkit is needed. The same
wheel and source give the same bytes, so a test can tell whether the committed PTX is the source's. The architecture
is the oldest we serve: drivers translate the PTX for the GPU they find.
"""

import ctypes
import sys
import sysconfig
from pathlib import Path

ARCHITECTURE = b"compute_75"
# It is mangled into symbols, so it must not depend on where the source lies.
PROGRAM = b"blake3.cu"


def library() -> ctypes.CDLL:
    folder = Path(sysconfig.get_paths()["purelib"]) / "nvidia" / "cuda_nvrtc" / "lib"
    found = sorted(folder.glob("libnvrtc.so.*"))
    if not found:
        sys.exit("make_ptx.py: this Python has no nvidia-cuda-nvrtc-cu12; it is in xtask/python/requirements.lock")
    return ctypes.CDLL(str(found[0]))


def text(size_of, read, program) -> bytes:
    size = ctypes.c_size_t()
    size_of(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    read(program, buffer)
    return buffer.value


def main(source: Path, ptx: Path) -> None:
    nvrtc = library()
    program = ctypes.c_void_p()
    code = nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.read_bytes(), PROGRAM, 0, None, None)
    if code != 0:
        sys.exit(f"make_ptx.py: nvrtcCreateProgram gave {code}")
    options = [b"--gpu-architecture=" + ARCHITECTURE]
    code = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    sys.stderr.write(text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program).decode())
    if code != 0:
        sys.exit(f"make_ptx.py: nvrtcCompileProgram gave {code}")
    ptx.write_bytes(text(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
