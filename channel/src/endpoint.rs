//! Where an exporter listens, as locators carry it.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    str::FromStr,
};

/// The longest text: a name of 253 bytes, a port, a pin.
const MAX_TEXT: usize = 253 + 6 + 1 + 64;

/// A host, a port and, where the exporter made its own certificate, what to know it by.
///
/// As text `HOST:PORT` or `HOST:PORT#PIN`; an IPv6 address stands in brackets.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Endpoint {
    /// Whom to dial.
    pub host: Host,
    /// The TCP port; never 0.
    pub port: u16,
    /// The certificate that must answer, whoever signed it.
    pub pin: Option<Pin>,
}

/// A host by name or address.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Host {
    /// A name for the system's resolver: 1 to 253 letters, digits, `-`, `_` and `.`.
    Name(String),
    /// An address without a zone: a zone means something on one host only.
    Address(IpAddr),
}

/// BLAKE3 of a certificate's DER bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Pin([u8; 32]);

/// Why a text is no endpoint.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EndpointError {
    /// Too long to be one.
    #[error("{0} bytes are no endpoint; at most {MAX_TEXT} are")]
    TooLong(usize),
    /// No port, or one that is no number from 1 to 65535.
    #[error("`{0}` has no port: write HOST:PORT, or [ADDRESS]:PORT for IPv6")]
    Port(String),
    /// Neither an address nor a name.
    #[error("`{0}` is neither an address nor a host name")]
    Host(String),
    /// The part after `#`.
    #[error("`{0}` is no pin of 64 hexadecimal digits")]
    Pin(String),
}

impl Host {
    /// Whether the text alone says that it is this host.
    pub fn is_loopback(&self) -> bool {
        match self {
            Self::Name(name) => name.eq_ignore_ascii_case("localhost"),
            Self::Address(address) => address.to_canonical().is_loopback(),
        }
    }
}

impl Pin {
    /// Of a certificate.
    pub fn of(certificate: &[u8]) -> Self {
        Self(*blake3::hash(certificate).as_bytes())
    }
}

impl FromStr for Host {
    type Err = EndpointError;

    /// A name, an IPv4 address, or an IPv6 address with or without brackets.
    fn from_str(text: &str) -> Result<Self, EndpointError> {
        let refused = || EndpointError::Host(shown(text));
        let inner = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
        if let Some(inner) = inner {
            return inner.parse::<Ipv6Addr>().map(|v6| Self::Address(v6.into())).map_err(|_| refused());
        }
        if let Ok(address) = text.parse::<IpAddr>() {
            return Ok(Self::Address(address));
        }
        let label = |label: &str| {
            let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
            (1..=63).contains(&label.len()) && label.chars().all(plain)
        };
        // `1.2.3` and `300.1.1.1` are addresses gone wrong, whatever a resolver makes of them.
        let last = text.rsplit('.').next().unwrap_or_default();
        let named = text.len() <= 253
            && text.split('.').all(label)
            && !last.bytes().all(|b| b.is_ascii_digit())
            && text.parse::<Ipv4Addr>().is_err();
        if named { Ok(Self::Name(text.to_owned())) } else { Err(refused()) }
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(name) => f.write_str(name),
            Self::Address(IpAddr::V4(v4)) => write!(f, "{v4}"),
            Self::Address(IpAddr::V6(v6)) => write!(f, "[{v6}]"),
        }
    }
}

impl FromStr for Pin {
    type Err = EndpointError;

    fn from_str(text: &str) -> Result<Self, EndpointError> {
        let lower = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
        if !text.bytes().all(lower) {
            return Err(EndpointError::Pin(shown(text)));
        }
        let hash = blake3::Hash::from_hex(text).map_err(|_| EndpointError::Pin(shown(text)))?;
        Ok(Self(*hash.as_bytes()))
    }
}

impl fmt::Display for Pin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Pin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pin({self})")
    }
}

impl FromStr for Endpoint {
    type Err = EndpointError;

    fn from_str(text: &str) -> Result<Self, EndpointError> {
        if text.len() > MAX_TEXT {
            return Err(EndpointError::TooLong(text.len()));
        }
        let (place, pin) = match text.split_once('#') {
            Some((place, pin)) => (place, Some(pin.parse()?)),
            None => (text, None),
        };
        let without_port = || EndpointError::Port(shown(text));
        let (host, port) = place.rsplit_once(':').ok_or_else(without_port)?;
        // Digits only: `+80` is a number for the standard library and none for people.
        if !port.bytes().all(|b| b.is_ascii_digit()) {
            return Err(without_port());
        }
        let port = port.parse().ok().filter(|port| *port != 0).ok_or_else(without_port)?;
        // Without brackets nobody can say where an IPv6 address ends.
        if host.contains(':') && !host.starts_with('[') {
            return Err(without_port());
        }
        Ok(Self { host: host.parse()?, port, pin })
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.host, self.port)?;
        self.pin.iter().try_for_each(|pin| write!(f, "#{pin}"))
    }
}

impl Endpoint {
    /// As people read it in an error: without the pin.
    pub fn place(&self) -> String {
        format!("{}:{}", self.host, self.port)
    }
}

/// What a peer wrote, for an error: bounded and printable.
fn shown(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(80).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn hosts() -> impl Strategy<Value = Host> {
        prop_oneof![
            any::<Ipv4Addr>().prop_map(|v4| Host::Address(v4.into())),
            any::<Ipv6Addr>().prop_map(|v6| Host::Address(v6.into())),
            "[a-z][a-z0-9_-]{0,20}(\\.[a-z][a-z0-9-]{0,20}){0,3}".prop_map(Host::Name),
        ]
    }

    proptest! {
        #[test]
        fn every_endpoint_reads_back(host in hosts(), port in 1u16.., pin in any::<Option<[u8; 32]>>()) {
            let endpoint = Endpoint { host, port, pin: pin.map(Pin) };
            prop_assert_eq!(endpoint.to_string().parse(), Ok(endpoint));
        }

        #[test]
        fn what_parses_is_written_so_that_it_parses_the_same(text in "[0-9a-f:.\\[\\]#xz-]{0,40}") {
            if let Ok(endpoint) = text.parse::<Endpoint>() {
                prop_assert_eq!(endpoint.to_string().parse(), Ok(endpoint));
            }
        }

        #[test]
        fn no_text_panics(text in ".{0,400}") {
            let _ = text.parse::<Endpoint>();
        }
    }

    #[test]
    fn each_form_is_read() {
        let read = |text: &str| text.parse::<Endpoint>().map(|e| (e.host, e.port));
        let v6: Ipv6Addr = "fd00::7".parse().unwrap();
        assert_eq!(read("node-3.rack:7400"), Ok((Host::Name("node-3.rack".into()), 7400)));
        assert_eq!(read("10.0.0.7:1"), Ok((Host::Address(Ipv4Addr::new(10, 0, 0, 7).into()), 1)));
        assert_eq!(read("[fd00::7]:65535"), Ok((Host::Address(v6.into()), 65535)));
    }

    #[test]
    fn what_is_no_endpoint_is_refused_by_what_is_wrong() {
        let refused = |text: &str| text.parse::<Endpoint>().unwrap_err();
        for text in ["", "host", "host:", "host:0", "host:+1", "host:65536", "fd00::7:80", "host:1:2"] {
            assert!(matches!(refused(text), EndpointError::Port(_)), "{text}");
        }
        for text in [":1", "a..b:1", "a b:1", "[10.0.0.1]:1", "[fe80::1%eth0]:1", "300.1.1.1:1", "/x:1"] {
            assert!(matches!(refused(text), EndpointError::Host(_)), "{text}");
        }
        assert!(matches!(refused("h:1#"), EndpointError::Pin(_)));
        assert!(matches!(refused(&format!("h:1#{}", "A".repeat(64))), EndpointError::Pin(_)));
        assert_eq!(refused(&"x".repeat(400)), EndpointError::TooLong(400));
    }

    #[test]
    fn loopback_is_told_by_the_text() {
        for (text, is) in [
            ("127.9.9.9", true),
            ("::1", true),
            ("::ffff:127.0.0.1", true),
            ("localhost", true),
            ("10.0.0.1", false),
            ("node", false),
        ] {
            assert_eq!(text.parse::<Host>().unwrap().is_loopback(), is, "{text}");
        }
    }
}
