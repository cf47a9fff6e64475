//! The exporter's thread: answers each reader once, and waits for none.
//!
//! One poll loop over non-blocking sockets; a reader that is slow, silent or talks nonsense costs one slot
//! until its deadline and delays nobody. An answered reader's connection is kept so that it breaks when this
//! process dies, or when the arena is gone.

use crate::{
    error::Refusal,
    registry::Registry,
    wire::{REQUEST_LEN, Reply, Request},
};
use flashboot_channel::local::Policy;
use flashboot_core::Arena;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    net::{
        RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, accept_with, recv,
        sendmsg, sockopt::socket_peercred,
    },
};
use std::{
    io::IoSlice,
    mem::MaybeUninit,
    os::fd::{BorrowedFd, OwnedFd},
    sync::{Arc, Weak},
    time::{Duration, Instant},
};

/// How often an idle loop looks whether the arenas of attached readers are still there.
const TICK: Duration = Duration::from_millis(250);
/// How long the listener rests when the process has no descriptors left.
const REST: Duration = Duration::from_millis(20);
/// Connections taken a turn, so that a flood delays the answers by little.
const ACCEPTS: usize = 16;
/// Users that are not allowed wait for their refusal this long at most.
const UNWELCOME: Duration = Duration::from_millis(500);

#[derive(Debug)]
pub(crate) struct Responder {
    pub(crate) listener: OwnedFd,
    /// Becomes readable when the endpoint closes.
    pub(crate) close: OwnedFd,
    pub(crate) registry: Arc<Registry>,
    pub(crate) policy: Policy,
    pub(crate) handshake: Duration,
    pub(crate) max_pending: usize,
    pub(crate) max_readers: usize,
}

struct Connection {
    socket: OwnedFd,
    state: State,
}

enum State {
    /// Has not said yet what it wants.
    Pending { until: Instant, admitted: bool },
    /// Has its descriptor.
    Attached { arena: Weak<dyn Arena> },
}

impl Responder {
    pub(crate) fn run(self) {
        let mut connections: Vec<Connection> = Vec::new();
        let mut rest_until = None;
        loop {
            let now = Instant::now();
            rest_until = rest_until.filter(|until| *until > now);
            let timeout = wait_for(&connections, rest_until, now);
            let listen = if rest_until.is_none() { PollFlags::IN } else { PollFlags::empty() };
            let mut polled = Vec::with_capacity(connections.len() + 2);
            polled.push(PollFd::new(&self.close, PollFlags::IN));
            polled.push(PollFd::new(&self.listener, listen));
            polled.extend(connections.iter().map(|c| PollFd::new(&c.socket, PollFlags::IN)));
            match poll(&mut polled, timeout.as_ref()) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => {
                    tracing::error!(%errno, "poll of an ipc endpoint");
                    std::thread::sleep(REST);
                }
            }
            let ready: Vec<bool> = polled.iter().map(|p| !p.revents().is_empty()).collect();
            drop(polled);
            let (endpoint, readers) = ready.split_at_checked(2).unwrap_or_default();
            if endpoint.first() == Some(&true) {
                return;
            }
            let now = Instant::now();
            let mut ready = readers.iter();
            connections.retain_mut(|connection| {
                let readable = ready.next().copied().unwrap_or(false);
                self.keeps(connection, readable, now)
            });
            if endpoint.get(1) == Some(&true) {
                rest_until = self.accept(&mut connections, now);
            }
        }
    }

    /// Moves one connection on; `false` closes it.
    fn keeps(&self, connection: &mut Connection, readable: bool, now: Instant) -> bool {
        match connection.state {
            State::Pending { admitted, .. } if readable => match self.answer(&connection.socket, admitted) {
                Answer::Attached(arena) => {
                    connection.state = State::Attached { arena };
                    true
                }
                Answer::NotYet => true,
                Answer::Refused => false,
            },
            State::Pending { until, .. } => now < until,
            // An attached reader has nothing to say: it went, or it broke the protocol.
            State::Attached { .. } if readable => false,
            State::Attached { ref arena } => arena.strong_count() > 0,
        }
    }

    fn answer(&self, socket: &OwnedFd, admitted: bool) -> Answer {
        // One byte more than a request has, so that a longer one shows. recv without a control buffer also
        // drops any descriptor that a reader sends.
        let mut frame = [0; REQUEST_LEN + 1];
        let len = match recv(socket, &mut frame, RecvFlags::DONTWAIT) {
            Ok((0, _)) => return Answer::Refused,
            Ok((len, _)) => len.min(frame.len()),
            Err(Errno::AGAIN | Errno::INTR) => return Answer::NotYet,
            Err(_) => return Answer::Refused,
        };
        if !admitted {
            refuse(socket, Refusal::NotPermitted, "your uid and gid are not allowed");
            return Answer::Refused;
        }
        let found = Request::decode(frame.get(..len).unwrap_or_default()).and_then(|request| {
            let offer =
                self.registry.find(request.generation).map_err(|why| (Refusal::StaleGeneration, why))?;
            Ok((request, offer))
        });
        match found {
            Ok((request, offer)) => {
                let arena = offer.arena();
                let reply = Reply {
                    status: Ok(()),
                    memory: offer.memory(),
                    payload: arena.payload(),
                    capacity: arena.capacity(),
                    shards: arena.shards(),
                    generation: request.generation,
                };
                if send(socket, &reply, &offer.descriptors()).is_err() {
                    return Answer::Refused;
                }
                tracing::debug!(generation = %format_args!("{:016x}", request.generation), "a reader attached");
                Answer::Attached(Arc::downgrade(&arena))
            }
            Err((refusal, why)) => {
                refuse(socket, refusal, &why);
                Answer::Refused
            }
        }
    }

    /// Takes new connections; returns until when to rest when there are no descriptors for them.
    fn accept(&self, connections: &mut Vec<Connection>, now: Instant) -> Option<Instant> {
        for _ in 0..ACCEPTS {
            let socket = match accept_with(&self.listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(socket) => socket,
                Err(Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::NOBUFS) => {
                    tracing::warn!("no descriptors left for a reader");
                    return now.checked_add(REST);
                }
                // Nobody left, or the one that came is gone.
                Err(_) => return None,
            };
            let Ok(peer) = socket_peercred(&socket) else { continue };
            let admitted = self.policy.admits_reader(peer.uid.as_raw(), peer.gid.as_raw());
            let pending = connections.iter().filter(|c| matches!(c.state, State::Pending { .. })).count();
            let attached = connections.len().saturating_sub(pending);
            if pending >= self.max_pending || attached >= self.max_readers {
                let what = format!("{pending} readers in their handshake and {attached} attached");
                refuse(&socket, Refusal::Full, &what);
                continue;
            }
            if !admitted {
                tracing::warn!(uid = peer.uid.as_raw(), pid = peer.pid.as_raw_pid(), "refusing a reader");
            }
            let patience = if admitted { self.handshake } else { self.handshake.min(UNWELCOME) };
            let until = now.checked_add(patience).unwrap_or(now);
            connections.push(Connection { socket, state: State::Pending { until, admitted } });
        }
        None
    }
}

enum Answer {
    Attached(Weak<dyn Arena>),
    NotYet,
    Refused,
}

/// Until the next deadline; `None` when there is none.
fn wait_for(connections: &[Connection], rest: Option<Instant>, now: Instant) -> Option<Timespec> {
    let next = connections
        .iter()
        .map(|c| match c.state {
            State::Pending { until, .. } => until.saturating_duration_since(now),
            State::Attached { .. } => TICK,
        })
        .chain(rest.map(|until| until.saturating_duration_since(now)))
        .min()?;
    // Rounded up, so that the deadline has passed when poll returns.
    let next = next.saturating_add(Duration::from_micros(1));
    Some(Timespec {
        tv_sec: i64::try_from(next.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: next.subsec_nanos().into(),
    })
}

fn refuse(socket: &OwnedFd, refusal: Refusal, why: &str) {
    tracing::debug!(?refusal, why, "refused a reader");
    // A reader that is gone needs no answer.
    let _ = send(socket, &Reply::refusal(refusal, why), &[]);
}

fn send(socket: &OwnedFd, reply: &Reply, descriptors: &[BorrowedFd<'_>]) -> Result<(), Errno> {
    let frame = reply.encode();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(Errno::NOBUFS);
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    sendmsg(socket, &[IoSlice::new(&frame)], &mut control, flags).map(drop)
}
