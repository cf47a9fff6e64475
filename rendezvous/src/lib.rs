//! How the processes of one replication find one another: a [`Board`] of named values, each set once.
//!
//! Exporters put their locators on it, clones wait for them; a barrier is every rank's name on it. It carries
//! a few hundred bytes a rank and no payload. [`LocalBoard`] is for tasks of one process, [`BoardServer`] and
//! [`SocketBoard`] for processes of one host.
#![forbid(unsafe_code)]

mod board;
mod local;
mod socket;

pub use board::{Board, barrier};
pub use local::LocalBoard;
pub use socket::{BoardServer, SocketBoard};
