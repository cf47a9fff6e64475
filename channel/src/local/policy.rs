//! Who may talk to us, by what the kernel says of the other end.

use super::failed;
use flashboot_core::Result;
use rustix::net::sockopt::socket_peercred;
use std::os::fd::AsFd;

/// Who may talk to us.
#[derive(Debug, Clone)]
pub struct Policy {
    own: u32,
    uids: Vec<u32>,
    gids: Vec<u32>,
}

/// Who is at the other end of a socket: as it was when it connected, or listened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer {
    /// Its effective user.
    pub uid: u32,
    /// Its effective group.
    pub gid: u32,
    /// Its process, as seen from here.
    pub pid: i32,
}

impl Peer {
    /// Asks the kernel.
    ///
    /// # Errors
    /// The system's own.
    pub fn of(socket: impl AsFd) -> Result<Self> {
        let peer = socket_peercred(socket)
            .map_err(|errno| failed("getsockopt(SO_PEERCRED)", errno, "the other end's identity"))?;
        Ok(Self { uid: peer.uid.as_raw(), gid: peer.gid.as_raw(), pid: peer.pid.as_raw_pid() })
    }
}

impl Policy {
    /// Our own user, and these users and primary groups.
    pub fn new(uids: &[u32], gids: &[u32]) -> Self {
        Self { own: rustix::process::geteuid().as_raw(), uids: uids.to_vec(), gids: gids.to_vec() }
    }

    /// Whether others than our own user are let in.
    pub fn is_shared(&self) -> bool {
        !self.uids.is_empty() || !self.gids.is_empty()
    }

    /// Whether such a client may be served.
    pub fn admits_reader(&self, uid: u32, gid: u32) -> bool {
        uid == self.own || self.uids.contains(&uid) || self.gids.contains(&gid)
    }

    /// Whether such a server may be trusted. It may also be root: root could write our memory anyway.
    pub fn admits_source(&self, uid: u32, gid: u32) -> bool {
        uid == 0 || self.admits_reader(uid, gid)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ones_own_user_and_those_that_were_named_are_let_in_and_root_only_as_a_server() {
        let own = rustix::process::geteuid().as_raw();
        let (other, another) = (own.wrapping_add(1000), own.wrapping_add(1001));
        let alone = Policy::new(&[], &[]);
        assert!(alone.admits_reader(own, other) && !alone.admits_reader(other, own) && !alone.is_shared());
        assert!(alone.admits_source(0, 0) && !alone.admits_source(other, own));
        let shared = Policy::new(&[other], &[another]);
        assert!(
            shared.is_shared() && shared.admits_reader(other, 5) && shared.admits_reader(another, another)
        );
        assert!(!shared.admits_reader(another, other));
    }
}
