//! What a service manager is told (`sd_notify(3)`): a few words in one datagram to the socket that it named.

use std::{
    ffi::OsStr,
    os::{
        linux::net::SocketAddrExt as _,
        unix::{
            ffi::OsStrExt as _,
            net::{SocketAddr, UnixDatagram},
        },
    },
};

/// Where the service manager listens, if there is one.
#[derive(Debug, Clone, Default)]
pub struct Notify(Option<SocketAddr>);

impl Notify {
    /// From what the face found in `NOTIFY_SOCKET`: a path, or `@` and an abstract name. Anything else is nobody.
    pub fn new(socket: Option<&OsStr>) -> Self {
        let socket = socket.filter(|socket| !socket.is_empty());
        let address = socket.map(|socket| match socket.as_bytes().split_first() {
            Some((b'@', name)) => SocketAddr::from_abstract_name(name),
            _ => SocketAddr::from_pathname(socket),
        });
        match address.transpose() {
            Ok(address) => Self(address),
            Err(error) => {
                tracing::warn!(%error, "NOTIFY_SOCKET names no socket");
                Self(None)
            }
        }
    }

    /// Tells it `state`, such as `READY=1`. That it does not hear is its own business, and logged.
    pub fn tell(&self, state: &str) {
        let Some(address) = &self.0 else { return };
        let told = UnixDatagram::unbound().and_then(|socket| {
            // A manager that does not read holds nobody up.
            socket.set_nonblocking(true)?;
            socket.send_to_addr(state.as_bytes(), address)
        });
        if let Err(error) = told {
            tracing::warn!(%error, state, "the service manager does not hear");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_manager_hears_by_path_and_by_name_and_nobody_is_no_error() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notify");
        let name = format!("flashboot-notify-{}", std::process::id());
        let abstract_name = SocketAddr::from_abstract_name(&name).unwrap();
        for (socket, at) in [
            (UnixDatagram::bind(&path).unwrap(), path.as_os_str().to_owned()),
            (UnixDatagram::bind_addr(&abstract_name).unwrap(), format!("@{name}").into()),
        ] {
            Notify::new(Some(&at)).tell("READY=1");
            let mut heard = [0; 100];
            let len = socket.recv(&mut heard).unwrap();
            assert_eq!(&heard[..len], b"READY=1");
        }
        Notify::new(None).tell("READY=1");
        Notify::new(Some(OsStr::new(""))).tell("READY=1");
        Notify::new(Some(OsStr::new("/there/is/nobody"))).tell("READY=1");
        Notify::new(Some(OsStr::new(&"long".repeat(100)))).tell("READY=1");
    }
}
