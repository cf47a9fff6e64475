//! The replication service's protocol, pure: what is said, and what follows from it. No socket, no clock.
//!
//! Members are fillings of arenas: seeds that hold a whole rank image, and clones that read one. [`Service`] takes a
//! [`Request`] and the moment it came at, and gives the [`Answer`]; it never speaks first, so an answer that is lost is
//! asked for again. Every request may come twice. `docs/rendezvous.md` is the protocol for people.
//!
//! One file each: what is said ([`message`](self)), why something is refused ([`refusal`](self)), who there is
//! ([`member`](self)), the nearest free link ([`placement`](self)), who may read from whom ([`graph`](self)), manifests
//! ([`manifest`](self)), what members are held to ([`rules`](self)), the machine itself ([`service`](self)) and its
//! answers to who comes ([`join`](self)) and who stays or goes ([`news`](self)).
//!
//! Must never: read a clock, answer one thing to the first and another to the doubled message, let a member read
//! from one that holds another content, or from one that reads from it.

mod check;
mod graph;
mod join;
mod links;
mod manifest;
mod member;
mod message;
mod news;
mod placement;
mod refusal;
mod ring;
mod rules;
mod service;
mod status;

pub use member::{Blame, Cause, Content, Holder, MemberId, Place, Plan, Reader, Registration, Role, Wanted};
pub use message::{
    Answer, Greeting, Hello, MAX_ANSWER, MAX_REQUEST, NEWEST, OLDEST, PART, Request, agree, decode, encode,
};
pub use placement::{Candidate, Distance, Link, chain, choose, crossed, distance};
pub use refusal::{Reason, Refusal};
pub use ring::{NODES, Ring, RingMember, RingNode};
pub use rules::Rules;
pub use service::Service;
pub use status::{Bound, Egress, MemberStatus, Status, readers_of};
