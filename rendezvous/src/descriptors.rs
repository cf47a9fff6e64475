//! Descriptors of this process: a server has one open a connection, and most systems begin a process with 1,024.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Lets this process have `wanted` descriptors open, or as many as its hard limit allows; returns how many it may have
/// then. For programs: a library does not change its process.
pub fn descriptors(wanted: u64) -> u64 {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let most = maximum.map_or(wanted, |most| most.min(wanted));
    match current {
        Some(current) if current < most => {
            let raised = setrlimit(Resource::Nofile, Rlimit { current: Some(most), maximum });
            if raised.is_ok() { most } else { current }
        }
        Some(current) => current,
        None => u64::MAX,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_are_had_up_to_the_hard_limit_and_never_fewer() {
        let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
        let (had, most) = (current.unwrap_or(u64::MAX), maximum.unwrap_or(u64::MAX));
        assert_eq!(descriptors(1), had);
        assert_eq!(getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX), had);
        let wanted = (had + 1).min(4096).max(had);
        assert_eq!(descriptors(wanted), wanted.min(most).max(had));
        assert_eq!(getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX), wanted.min(most).max(had));
    }
}
