//! From wherever one rank's bytes are into an arena; or a stock checkpoint's tensors, as far as one rank needs them, into
//! bounded host memory. `docs/loader.md` is the map.
//!
//! Owns: direct reads ([`io`]), the byte budget ([`budget`]), slabs ([`slab`]), the way into an arena ([`pipeline`]), the agent that
//! keeps images in memory between loads ([`agent`]).
//!
//! Must never: hold unsafe code, read an environment variable, wait without a deadline, or call bytes verified that no
//! digest was compared with.
#![forbid(unsafe_code)]

pub mod agent;
pub mod budget;
pub mod gather;
pub mod io;
pub mod memlog;
pub mod pipeline;
pub mod ranks;
pub mod slab;
pub mod source;
