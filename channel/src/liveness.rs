//! Sockets that notice when the other end has gone without a word.

use flashboot_core::{Code, Error, Kind, Result};
use rustix::net::sockopt;
use std::{os::fd::AsFd, time::Duration};

/// After how long a silent peer is taken for gone.
///
/// An idle connection is probed, and what was sent must be acknowledged, within the bound; then the system ends the
/// connection with `ETIMEDOUT`. Whole seconds, at least [`Liveness::SHORTEST`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Liveness(Duration);

impl Default for Liveness {
    /// 15 s.
    fn default() -> Self {
        Self(Duration::from_secs(15))
    }
}

impl Liveness {
    /// One second before the first probe and one for each of two.
    pub const SHORTEST: Duration = Duration::from_secs(3);

    /// Within `bound`.
    ///
    /// # Errors
    /// [`Kind::Invalid`] below [`SHORTEST`](Self::SHORTEST) and above a day.
    pub fn within(bound: Duration) -> Result<Self> {
        if (Self::SHORTEST..=Duration::from_secs(86_400)).contains(&bound) {
            return Ok(Self(bound));
        }
        Err(Error::new(Kind::Invalid, "liveness", format!("{bound:?} is not between 3 s and a day")))
    }

    /// The bound.
    pub fn bound(self) -> Duration {
        self.0
    }

    /// (idle before the first probe, between probes, probes): together no more than the bound.
    fn probes(self) -> (Duration, Duration, u32) {
        let bound = self.0.as_secs();
        let idle = bound / 3;
        let interval = (bound / 6).max(1);
        let count = (bound - idle) / interval;
        (Duration::from_secs(idle), Duration::from_secs(interval), u32::try_from(count).unwrap_or(u32::MAX))
    }

    /// Sets the socket's options, and sends what is written without waiting for more.
    pub(crate) fn apply(self, socket: impl AsFd) -> Result<()> {
        let socket = socket.as_fd();
        let (idle, interval, count) = self.probes();
        let millis = u32::try_from(self.0.as_millis()).unwrap_or(u32::MAX);
        let set = || {
            sockopt::set_tcp_nodelay(socket, true)?;
            sockopt::set_tcp_keepidle(socket, idle)?;
            sockopt::set_tcp_keepintvl(socket, interval)?;
            sockopt::set_tcp_keepcnt(socket, count)?;
            sockopt::set_tcp_user_timeout(socket, millis)?;
            sockopt::set_socket_keepalive(socket, true)
        };
        set().map_err(|errno: rustix::io::Errno| {
            Error::new(Kind::Io, "setsockopt", "keepalive of a TCP socket")
                .with_code(Code::Errno(errno.raw_os_error()))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn idle_time_and_probes_end_within_the_bound(seconds in 3u64..=86_400) {
            let bound = Duration::from_secs(seconds);
            let (idle, interval, count) = Liveness::within(bound).unwrap().probes();
            prop_assert!(!idle.is_zero() && !interval.is_zero() && count >= 2);
            prop_assert!(idle + interval * count <= bound);
            prop_assert!(idle + interval * count + interval > bound);
        }
    }

    #[test]
    fn bounds_that_no_socket_keeps_are_refused() {
        for millis in [0, 2_999, 86_400_001] {
            assert!(Liveness::within(Duration::from_millis(millis)).is_err(), "{millis}");
        }
    }
}
