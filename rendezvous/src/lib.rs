//! How the processes of one replication find one another, and who reads from whom.
//!
//! The replication service is for seeds and clones of any hosts, that come and go: its [`protocol`], the [`Server`], a
//! [`Client`], and a [`Membership`] that lasts through the server's absence; a [`store`] says where the server is, and
//! lets one take another's place. A [`Board`] of named values, each set once, is for the processes of one run.
//!
//! Exporters put their locators on it, clones wait for them; a barrier is every rank's name on it. It carries
//! a few hundred bytes a rank and no payload. [`LocalBoard`] is for tasks of one process, [`BoardServer`] and
//! [`SocketBoard`] for processes of one host.
#![forbid(unsafe_code)]

mod board;
mod client;
mod descriptors;
mod ends;
mod inside;
mod local;
mod membership;
pub mod protocol;
mod readers;
mod ring;
mod server;
mod socket;
pub mod store;

pub use board::{Board, barrier};
pub use client::{Client, fetch_manifest, find, status};
pub use descriptors::descriptors;
pub use inside::Inside;
pub use local::LocalBoard;
pub use membership::{Fault, Footing, Loss, Membership, Pulse};
pub use ring::RingSeat;
pub use server::{Server, ServerConfig};
pub use socket::{BoardServer, SocketBoard};
