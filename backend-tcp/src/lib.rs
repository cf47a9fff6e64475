//! The `tcp` transport: framed reads over TCP, between any two hosts, from and into host or GPU memory.
//!
//! It is the fallback that works everywhere. A reader has one connection by which it watches the source's words and a few by
//! which it reads; ranges are striped over these. A host arena's bytes leave from where they lie, by `sendfile` off loopback, and
//! are received in place: this program copies none of them. GPU memory goes through pinned buffers, and TLS through its
//! own. Blocks are hashed from the destination, right behind the socket while they are in the cache, or on the GPU.
//! A reading connection that is reset or closed is made once more, and goes on where it was.
//!
//! The exporter is active here: it sends, so it can send slower ([`TcpConfig::rate`]), and it ends when it dies. A reader has
//! no way to write: the protocol has no such frame.
//!
//! Must never: send a byte past the payload (the control block is not read by range), wait without a bound, write into an
//! arena after a pull has quiesced, or listen off loopback without asking readers for anything, unless told so by name.
#![forbid(unsafe_code)]

mod arena;
mod config;
mod dial;
mod endpoint;
mod error;
mod exchange;
mod job;
mod lane;
mod mover;
mod probe;
mod registry;
mod responder;
mod runtime;
mod send;
mod throttle;
mod transport;
mod watch;
pub mod wire;

pub use config::TcpConfig;
pub use exchange::TcpExchange;
pub use transport::TcpTransport;
