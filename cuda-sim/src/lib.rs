//! A stand-in for `libcuda.so.1`.
