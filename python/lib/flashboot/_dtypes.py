"""Element types by the names that safetensors and images have for them."""

import torch

_NAMES = {
    "BOOL": "bool",
    "F4": "float4_e2m1fn_x2",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "C64": "complex64",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
}

#: Those that this torch has; none has the types of 6 bits.
DTYPES = {code: getattr(torch, name) for code, name in _NAMES.items() if hasattr(torch, name)}
CODES = {dtype: code for code, dtype in DTYPES.items()}
#: Types of which one of torch's elements holds two.
PACKED = frozenset({"F4"})
