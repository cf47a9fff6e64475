//! From a verb's number or a completion's status to the boundary's error, in one place.

use crate::verbs::{Status, VerbsError};
use flashboot_core::{ByteSize, Code, Error, Kind};
use rustix::process::{Resource, getrlimit};
use std::time::Duration;

const ENODEV: i32 = 19;
const ENOMEM: i32 = 12;
const EAGAIN: i32 = 11;
const ENETUNREACH: i32 = 101;
const EHOSTUNREACH: i32 = 113;
const ETIMEDOUT: i32 = 110;

/// A verb that failed on a port of a device.
pub(crate) fn failed(error: VerbsError, device: &str, port: Option<u8>, doing: &str) -> Error {
    let place = place(device, port);
    let made = Error::from_errno(error.call, error.errno, format!("{doing} on {place}"));
    match error.errno {
        ENODEV => Error::new(Kind::Unavailable, error.call, format!("{place} is not there (any more)"))
            .with_code(Code::Errno(ENODEV))
            .with_remedy("look at `rdma link` and at rdma.devices"),
        ENETUNREACH | EHOSTUNREACH | ETIMEDOUT => Error::new(
            Kind::SourceLost,
            error.call,
            format!("{doing} on {place}: the peer's address is not reached"),
        )
        .with_code(Code::Errno(error.errno))
        .with_remedy("check that both hosts are on one fabric, and rdma.devices and rdma.gid_index"),
        _ if made.kind() == Kind::Permission => {
            made.with_remedy("let this user open /dev/infiniband/uverbs*")
        }
        _ => made,
    }
}

/// As errors name a port.
pub(crate) fn place(device: &str, port: Option<u8>) -> String {
    match port {
        Some(port) => format!("{device} port {port}"),
        None => device.to_owned(),
    }
}

/// Memory that a device would not register. `needed` bytes in all.
pub(crate) fn not_registered(error: VerbsError, device: &str, needed: u64) -> Error {
    let limit = getrlimit(Resource::Memlock).current;
    let detail = format!("registering {} on {device}", ByteSize(needed));
    match limit {
        Some(limit) if matches!(error.errno, ENOMEM | EAGAIN) && limit < needed => Error::new(
            Kind::Exhausted,
            error.call,
            format!("{detail}: this process may lock {} ({needed} bytes are needed)", ByteSize(limit)),
        )
        .with_code(Code::Errno(error.errno))
        .with_remedy(format!("raise the limit: ulimit -l {} (KiB), or LimitMEMLOCK", needed.div_ceil(1024))),
        _ => Error::from_errno(error.call, error.errno, detail),
    }
}

/// A READ that completed with anything but success.
pub(crate) fn completed(status: Status, vendor: u32, device: &str, port: u8, peer: &str) -> Error {
    let place = place(device, Some(port));
    let (kind, what, remedy) = match status {
        Status::RETRY_EXCEEDED | Status::RESPONSE_TIMEOUT => (
            Kind::SourceLost,
            "the peer's NIC does not answer",
            "go on from another source; if both live, check the fabric between them, MTU and GIDs",
        ),
        Status::REMOTE_ACCESS => (
            Kind::SourceLost,
            "the peer's NIC refuses the key: what it stood for is not registered there, or not any more",
            "go on from another source, or fetch a fresh locator from the exporter",
        ),
        Status::REMOTE_INVALID | Status::REMOTE_OPERATION | Status::RNR_RETRY_EXCEEDED => {
            (Kind::SourceLost, "the peer refuses the READ", "go on from another source")
        }
        Status::LOCAL_PROTECTION => {
            (Kind::Io, "our own memory is not registered as it should be", "report this defect")
        }
        Status::FLUSHED => (Kind::SourceLost, "the queue pair was ended", "go on from another source"),
        _ => (Kind::Io, "the READ failed", "look at the kernel's log"),
    };
    Error::new(kind, "RDMA READ", format!("{what}: {status} on {place} (vendor code {vendor:#x})"))
        .with_code(Code::Verbs(status.0))
        .with_peer(peer)
        .with_remedy(remedy)
}

/// A device that neither completes a READ nor fails it.
pub(crate) fn silent(limit: Duration, device: &str, port: u8) -> Error {
    let place = place(device, Some(port));
    let detail = format!("{place} has completed nothing for {limit:?}, not even by giving the peer up");
    Error::new(Kind::Stalled, "RDMA READ", detail)
        .with_remedy("look at the kernel's log for the device, and go on from another source")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_failure_names_device_port_verb_and_code() {
        let error = VerbsError { call: "ibv_modify_qp", errno: 113 };
        let e = failed(error, "mlx5_0", Some(1), "connecting queue pair 7");
        assert_eq!((e.kind(), e.code(), e.op()), (Kind::SourceLost, Some(Code::Errno(113)), "ibv_modify_qp"));
        assert!(e.detail().contains("mlx5_0 port 1"), "{e}");
        let gone = failed(VerbsError { call: "ibv_open_device", errno: 19 }, "mlx5_0", None, "opening");
        assert_eq!(gone.kind(), Kind::Unavailable);
        let closed = failed(VerbsError { call: "ibv_open_device", errno: 13 }, "mlx5_0", None, "opening");
        assert_eq!(closed.kind(), Kind::Permission);
        assert!(closed.remedy().is_some_and(|r| r.contains("uverbs")));
    }

    #[test]
    fn each_status_has_its_kind_and_name() {
        let of = |status| {
            let e = completed(status, 0x81, "rxe0", 1, "h:1");
            assert!(e.detail().contains(status.name()) && e.detail().contains("rxe0 port 1"), "{e}");
            assert_eq!((e.code(), e.peer()), (Some(Code::Verbs(status.0)), Some("h:1")));
            e.kind()
        };
        assert_eq!(of(Status::RETRY_EXCEEDED), Kind::SourceLost);
        assert_eq!(of(Status::REMOTE_ACCESS), Kind::SourceLost);
        assert_eq!(of(Status::FLUSHED), Kind::SourceLost);
        assert_eq!(of(Status::LOCAL_PROTECTION), Kind::Io);
    }

    #[test]
    fn too_little_memlock_says_how_much_is_needed() {
        let e = not_registered(VerbsError { call: "ibv_reg_mr", errno: 12 }, "rxe0", u64::MAX / 2);
        assert_eq!((e.kind(), e.op()), (Kind::Exhausted, "ibv_reg_mr"));
        if getrlimit(Resource::Memlock).current.is_some() {
            assert!(e.to_string().contains(&format!("{} bytes are needed", u64::MAX / 2)), "{e}");
        }
        let other = not_registered(VerbsError { call: "ibv_reg_mr", errno: 14 }, "rxe0", 4096);
        assert_eq!(other.code(), Some(Code::Errno(14)));
    }
}
