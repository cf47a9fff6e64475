from typing import NamedTuple

class Tensor(NamedTuple):
    name: str
    dtype: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    what: str
