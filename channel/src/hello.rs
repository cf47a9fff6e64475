//! The first bytes of a channel, each way.
//!
//! | offset | bytes |
//! |---|---|
//! | 0 | magic |
//! | 8 | version, u16 |
//! | 10 | role: 1 the dialler, 2 the listener |
//! | 11 | bit 0: has a token; the others zero |
//! | 12 | purpose: up to 12 bytes of a-z, 0-9 and `-`, filled up with zeros |
//! | 24 | 32 random bytes |
//!
//! Little-endian. The first [`FIXED`] bytes stay as they are in every version, so that a release can name another's.

/// What every hello begins with.
pub const MAGIC: [u8; 8] = *b"FLASHNET";
/// The version that this release speaks.
pub const VERSION: u16 = 1;
/// Bytes of magic and version.
pub const FIXED: usize = 10;
/// Bytes of a hello of this version.
pub const LEN: usize = 56;
/// Bytes of a nonce.
pub(crate) const NONCE: usize = 32;

const PURPOSE: usize = 12;
const HAS_TOKEN: u8 = 1;
/// The content types of TLS records: a handshake and an alert.
const TLS_RECORDS: [u8; 2] = [0x16, 0x15];

/// Who says hello.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Role {
    /// Whoever dialled.
    Dialler = 1,
    /// Whoever was dialled.
    Listener = 2,
}

/// What a channel is for: a listener takes its own kind only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Purpose([u8; PURPOSE]);

impl Purpose {
    /// 1 to 12 letters a-z, digits and `-`; `None` for another text.
    pub const fn new(text: &str) -> Option<Self> {
        let bytes = text.as_bytes();
        if bytes.is_empty() || bytes.len() > PURPOSE {
            return None;
        }
        let mut padded = [0; PURPOSE];
        let (mut from, mut to) = (bytes, padded.as_mut_slice());
        while let (Some((byte, left)), Some((slot, rest))) = (from.split_first(), to.split_first_mut()) {
            *slot = *byte;
            (from, to) = (left, rest);
        }
        Self::checked(padded)
    }

    const fn checked(bytes: [u8; PURPOSE]) -> Option<Self> {
        let mut left = bytes.as_slice();
        let mut ended = false;
        let mut first = true;
        while let Some((byte, rest)) = left.split_first() {
            let plain = byte.is_ascii_lowercase() || byte.is_ascii_digit() || *byte == b'-';
            if first && !plain || ended && *byte != 0 || !plain && *byte != 0 {
                return None;
            }
            ended = *byte == 0;
            first = false;
            left = rest;
        }
        Some(Self(bytes))
    }
}

impl std::fmt::Display for Purpose {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let text = std::str::from_utf8(&self.0).unwrap_or_default();
        f.pad(text.trim_end_matches('\0'))
    }
}

/// One side's hello.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hello {
    /// Who says it.
    pub role: Role,
    /// What the channel is for.
    pub purpose: Purpose,
    /// Whether it has a token, and wants the other to prove that it has the same.
    pub token: bool,
    /// Random, so that no proof is of use twice.
    pub nonce: [u8; NONCE],
}

/// Why bytes are no hello.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HelloError {
    /// They are TLS's.
    #[error("it speaks TLS")]
    Tls,
    /// They are nobody's that we know.
    #[error("it does not begin as a channel does")]
    Magic,
    /// Another release.
    #[error("it speaks version {0} of the channel's protocol, this release version {VERSION}")]
    Version(u16),
    /// The dialler's where the listener's should be, or neither.
    #[error("it says hello in the role {0}")]
    Role(u8),
    /// A bit that means nothing in this version.
    #[error("the flags {0:#04x} are not of version {VERSION}")]
    Flags(u8),
    /// No purpose.
    #[error("its purpose is no text")]
    Purpose,
}

/// Checks what every version begins with.
pub fn check_fixed(bytes: [u8; FIXED]) -> Result<(), HelloError> {
    let [m0, m1, m2, m3, m4, m5, m6, m7, low, high] = bytes;
    if [m0, m1, m2, m3, m4, m5, m6, m7] != MAGIC {
        return Err(if TLS_RECORDS.contains(&m0) { HelloError::Tls } else { HelloError::Magic });
    }
    match u16::from_le_bytes([low, high]) {
        VERSION => Ok(()),
        other => Err(HelloError::Version(other)),
    }
}

impl Hello {
    /// As it is sent.
    pub fn encode(&self) -> [u8; LEN] {
        let mut out = [0; LEN];
        let flags = if self.token { HAS_TOKEN } else { 0 };
        let (version, role) = (VERSION.to_le_bytes(), self.role as u8);
        let fields = MAGIC.iter().chain(&version).chain([&role, &flags]);
        let fields = fields.chain(&self.purpose.0).chain(&self.nonce);
        out.iter_mut().zip(fields).for_each(|(slot, byte)| *slot = *byte);
        out
    }

    /// Reads what a peer in `role` sent.
    pub fn decode(bytes: &[u8; LEN], role: Role) -> Result<Self, HelloError> {
        let (fixed, rest) = bytes.split_first_chunk::<FIXED>().ok_or(HelloError::Magic)?;
        check_fixed(*fixed)?;
        let ([said, flags], rest) = rest.split_first_chunk::<2>().ok_or(HelloError::Magic)?;
        if *said != role as u8 {
            return Err(HelloError::Role(*said));
        }
        if *flags & !HAS_TOKEN != 0 {
            return Err(HelloError::Flags(*flags));
        }
        let (purpose, rest) = rest.split_first_chunk::<PURPOSE>().ok_or(HelloError::Purpose)?;
        let purpose = Purpose::checked(*purpose).ok_or(HelloError::Purpose)?;
        let nonce = *rest.first_chunk::<NONCE>().ok_or(HelloError::Magic)?;
        Ok(Self { role, purpose, token: *flags & HAS_TOKEN != 0, nonce })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn hello() -> Hello {
        let purpose = Purpose::new("tcp-read").unwrap();
        Hello { role: Role::Dialler, purpose, token: true, nonce: [7; NONCE] }
    }

    proptest! {
        #[test]
        fn whatever_decodes_encodes_to_the_same_bytes(mut bytes: [u8; LEN], ours: bool) {
            if ours {
                bytes[..FIXED].copy_from_slice(&hello().encode()[..FIXED]);
                bytes[10] = 1 + bytes[10] % 2;
                bytes[11] &= 1;
                bytes[12] = b'a' + bytes[12] % 26;
                bytes[13..24].fill(0);
            }
            for role in [Role::Dialler, Role::Listener] {
                if let Ok(read) = Hello::decode(&bytes, role) {
                    prop_assert_eq!(read.encode(), bytes);
                }
            }
        }
    }

    #[test]
    fn every_wrong_hello_is_refused_by_what_is_wrong() {
        let good = hello().encode();
        assert_eq!(Hello::decode(&good, Role::Dialler), Ok(hello()));
        let with = |at: usize, byte: u8| {
            let mut bytes = good;
            bytes[at] = byte;
            Hello::decode(&bytes, Role::Dialler).unwrap_err()
        };
        assert_eq!(with(0, b'G'), HelloError::Magic);
        assert_eq!(with(0, 0x16), HelloError::Tls);
        assert_eq!(with(8, 2), HelloError::Version(2));
        assert_eq!(with(10, 2), HelloError::Role(2));
        assert_eq!(with(11, 3), HelloError::Flags(3));
        assert_eq!(with(12, 0), HelloError::Purpose);
        assert_eq!(with(13, b'A'), HelloError::Purpose);
        assert_eq!(with(22, b'a'), HelloError::Purpose);
    }

    #[test]
    fn a_purpose_is_a_short_plain_text() {
        assert_eq!(Purpose::new("tcp").unwrap().to_string(), "tcp");
        assert_eq!(Purpose::new("abcdefghijkl").unwrap().to_string(), "abcdefghijkl");
        for bad in ["", "abcdefghijklm", "Tcp", "a b", "a\0b", "é"] {
            assert_eq!(Purpose::new(bad), None, "{bad}");
        }
    }
}
