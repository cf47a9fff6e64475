//! Control channels between hosts: who is there, who may talk, and how bytes are framed.
//!
//! Owns: the text form of an [`Endpoint`]; what protects a channel ([`Security`]: TLS, a token that is never sent, client
//! certificates, a pin); the handshake, bounded in time and number ([`Listener`], [`dial`]); sockets that find a half-open
//! peer ([`Liveness`]); length-prefixed frames with the caller's cap ([`frame`]). For processes of one host: who owns a Unix
//! socket, who may talk on it, and frames that carry descriptors ([`local`]). An error as JSON ([`ErrorWire`]).
//!
//! A channel begins, below its frames, so: TCP, TLS where the policy says so, one hello of [`hello::LEN`] bytes each way,
//! the dialler's proof that it has the token, the listener's verdict and its own proof. `docs/security.md` says what each
//! gives and what not.
//!
//! Must never: send a token, wait without a deadline, allocate by a length that a peer said before it was compared with
//! a cap, or let peers that prove nothing keep others out.
#![forbid(unsafe_code)]

mod auth;
mod blocking;
mod channel;
mod dial;
mod endpoint;
mod error;
pub mod frame;
mod handshake;
pub mod hello;
mod identity;
mod listener;
mod liveness;
pub mod local;
mod security;
mod tls;
mod token;
mod wire;

pub use blocking::Blocking;
pub use channel::Channel;
pub use dial::{Dial, dial};
pub use endpoint::{Endpoint, EndpointError, Host, Pin};
pub use error::failed;
pub use hello::Purpose;
pub use listener::{Listen, Listener};
pub use liveness::Liveness;
pub use security::{Security, SecurityConfig, TlsPolicy};
pub use token::Token;
pub use wire::{ErrorWire, kind_name};
