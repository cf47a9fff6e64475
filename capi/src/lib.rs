//! The C interface: the facade's calls for programs that are not Rust. `include/flashboot.h` is generated from this crate, and its
//! tests compile and run a program against it.
//!
//! Owns: handles that C cannot misuse into undefined behaviour (`handle`), status codes and the last error of each thread
//! (`status`), and the edge where pointers are read and written (`edge`).
//!
//! Must never: decide anything the facade decides, let a panic or an exception cross the boundary, look behind a handle that it did
//! not give out, or keep a pointer that it was given past the call.
//!
//! What C can still get wrong, and no check can find: a pointer to text or to a structure that is no such pointer, text that another
//! thread frees during the call, and memory of an arena that is used after the arena was released.
#![allow(non_camel_case_types, reason = "names as C has them")]

mod arena;
mod edge;
mod handle;
mod image;
mod load;
mod seed;
mod status;
mod torch;

pub use arena::*;
pub use image::*;
pub use load::*;
pub use seed::*;
pub use status::*;
pub use torch::*;

use std::ffi::c_char;

/// The number of this interface. It changes when a program that was compiled against an older header would no longer work.
pub const FB_ABI_VERSION: u32 = 1;

/// The number of the interface of the library that runs: compare it with `FB_ABI_VERSION` first of all.
#[unsafe(no_mangle)]
pub extern "C" fn fb_abi_version() -> u32 {
    FB_ABI_VERSION
}

/// The library's release, such as `0.1.0`.
#[unsafe(no_mangle)]
pub extern "C" fn fb_version() -> *const c_char {
    const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");
    VERSION.as_ptr().cast()
}
