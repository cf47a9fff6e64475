//! How people say where the service is: `tcp://HOST:PORT`, `etcd://HOST:PORT,HOST:PORT/NAME`, `dir:PATH`.

use flashboot_channel::{Endpoint, EndpointError};
use std::{fmt, path::PathBuf, str::FromStr};

/// The most servers of one etcd cluster that are named.
const SERVERS: usize = 16;
/// The longest name of a fleet within an etcd.
const NAME: usize = 128;
/// The name where none is said.
const DEFAULT: &str = "flashboot";

/// Where the service is, or who says where it is.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Address {
    /// There; written with or without `tcp://`.
    Tcp(Endpoint),
    /// Where an etcd says.
    Etcd(EtcdAddress),
    /// Where a file in a shared directory says.
    Dir(PathBuf),
}

/// An etcd, and which fleet of those in it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct EtcdAddress {
    /// Servers of one cluster, none with a pin; never empty.
    pub servers: Vec<Endpoint>,
    /// The fleet's name: letters, digits, `-`, `_`, `.` and `/` within.
    pub name: String,
}

/// Why a text is no address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AddressError {
    /// One of its hosts and ports.
    #[error(transparent)]
    Endpoint(#[from] EndpointError),
    /// Another kind than we know.
    #[error("`{0}://` is neither tcp:// nor etcd:// nor dir:")]
    Scheme(String),
    /// An etcd's server with a pin.
    #[error("an etcd's servers have no pin")]
    Pin,
    /// Too many servers.
    #[error("{0} servers; at most {SERVERS} are possible")]
    Servers(usize),
    /// A fleet's name that is none.
    #[error("`{0}` is no fleet's name: at most {NAME} of letters, digits, `-`, `_`, `.` and `/`")]
    Name(String),
    /// `dir:` and nothing after it.
    #[error("`dir:` without a directory")]
    Directory,
}

impl From<Endpoint> for Address {
    fn from(endpoint: Endpoint) -> Self {
        Self::Tcp(endpoint)
    }
}

impl FromStr for Address {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        if let Some(path) = text.strip_prefix("dir:") {
            return if path.is_empty() { Err(AddressError::Directory) } else { Ok(Self::Dir(path.into())) };
        }
        match text.split_once("://") {
            None => Ok(Self::Tcp(text.parse()?)),
            Some(("tcp", endpoint)) => Ok(Self::Tcp(endpoint.parse()?)),
            Some(("etcd", rest)) => rest.parse().map(Self::Etcd),
            Some((scheme, _)) => Err(AddressError::Scheme(shown(scheme))),
        }
    }
}

impl FromStr for EtcdAddress {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        let (servers, name) = text.split_once('/').unwrap_or((text, DEFAULT));
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        let part = |part: &str| !part.is_empty() && part.chars().all(plain);
        if name.len() > NAME || !name.split('/').all(part) {
            return Err(AddressError::Name(shown(name)));
        }
        let servers: Vec<Endpoint> = servers.split(',').map(str::parse).collect::<Result<_, _>>()?;
        if servers.len() > SERVERS {
            return Err(AddressError::Servers(servers.len()));
        }
        if servers.iter().any(|server| server.pin.is_some()) {
            return Err(AddressError::Pin);
        }
        Ok(Self { servers, name: name.to_owned() })
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(endpoint) => endpoint.fmt(f),
            Self::Etcd(etcd) => etcd.fmt(f),
            Self::Dir(path) => write!(f, "dir:{}", path.display()),
        }
    }
}

impl fmt::Display for EtcdAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let servers: Vec<_> = self.servers.iter().map(ToString::to_string).collect();
        write!(f, "etcd://{}/{}", servers.join(","), self.name)
    }
}

/// A bounded, printable piece of what was given.
fn shown(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(80).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn every_kind_is_read_as_it_is_written() {
        for text in [
            "127.0.0.1:7400",
            "tcp://[::1]:7400",
            "etcd://127.0.0.1:2379",
            "etcd://a:2379,b:2379,[::1]:9/prod/eu",
            "dir:/shared/fleet",
            "dir:relative",
        ] {
            let address: Address = text.parse().unwrap();
            assert_eq!(address.to_string().parse(), Ok(address), "{text}");
        }
        let Ok(Address::Etcd(etcd)) = "etcd://a:1".parse() else { panic!() };
        assert_eq!((etcd.name.as_str(), etcd.servers.len()), ("flashboot", 1));
    }

    #[test]
    fn what_is_no_address_is_refused_by_name() {
        let pin = format!("etcd://a:1#{}", "0".repeat(64));
        let many = format!("etcd://{}a:1", "a:1,".repeat(SERVERS));
        for (text, error) in [
            ("http://a:1", AddressError::Scheme("http".into())),
            ("dir:", AddressError::Directory),
            (pin.as_str(), AddressError::Pin),
            (many.as_str(), AddressError::Servers(SERVERS + 1)),
            ("etcd://a:1/", AddressError::Name(String::new())),
            ("etcd://a:1/x//y", AddressError::Name("x//y".into())),
            ("etcd://a:1/x y", AddressError::Name("x y".into())),
        ] {
            assert_eq!(text.parse::<Address>(), Err(error), "{text}");
        }
        for text in ["", "etcd://", "etcd://a", "tcp://", "etcd://a:1,"] {
            assert!(matches!(text.parse::<Address>(), Err(AddressError::Endpoint(_))), "{text}");
        }
    }

    proptest! {
        #[test]
        fn whatever_parses_is_the_same_once_written(text in "(etcd://|tcp://|dir:|)[a-c:,/.0-9#-]{0,20}") {
            if let Ok(address) = text.parse::<Address>() {
                prop_assert_eq!(address.to_string().parse(), Ok(address));
            }
        }
    }
}
