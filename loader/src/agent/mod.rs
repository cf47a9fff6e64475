//! The node agent: images in host memory ahead of the engines that want them (*staged*), and arenas that stay in memory
//! between engines (*held*). `docs/agent.md` is for who runs one.
//!
//! Owns: what the agent has and what has to go for what ([`Ledger`], pure); the memory itself ([`Agent`]); the control socket
//! and its protocol ([`serve`](fn@serve), [`Client`]); what of it a load sees ([`StagedSource`], [`HeldSource`]).
//!
//! Must never: call anything ready that was not verified; give memory away that somebody has attached; read a file by the
//! name that a client gives; wait for a client without a deadline.

mod attached;
mod client;
mod filler;
mod give;
mod keep;
mod ledger;
mod protocol;
mod serve;
mod session;
mod source;
mod store;
mod thing;

pub use attached::{AttachedProducer, Target};
pub use client::{Attached, Client, ClientConfig, Order, Payload};
pub use ledger::{Ask, Counts, Entry, Holding, Id, Key, Ledger, Made, Place, State};
pub use protocol::{MOST_MANIFEST, PROTOCOL_VERSION};
pub use serve::{SOCKET, ServeConfig, Serving, serve};
pub use source::{HeldSource, StagedSource};
pub use store::{Agent, AgentConfig, Listed, Status};
