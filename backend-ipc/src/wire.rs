//! The two frames of a handshake, each one packet of a SOCK_SEQPACKET Unix socket, little-endian.
//!
//! Request (32 bytes): magic u64 · version u32 · zero u32 · generation u64 · token u64 (zero: none).
//! Reply (48 bytes and up to 512 of text): magic u64 · version u32 · status u32 (0 or a refusal's number) ·
//! payload u64 · capacity u64 · shards u32 · bytes of text u16 · memory u16 (0 host, 1 GPU) · generation u64 · text. A
//! reply with status 0 carries descriptors by SCM_RIGHTS: the host arena's memfd, or the GPU arena's memory and behind it,
//! where the exporter has one, the memfd of its words (an arena without payload); any other reply carries none. The bytes of `memory` were the upper half of the text's length, always zero: frames
//! about host arenas have not changed, and whoever does not know GPU memory finds a length that cannot be.

use crate::error::Refusal;
use flashboot_core::{Error, Kind, MemoryKind, Result};

/// `FLASHIPC` as it reads in memory.
pub const PROTOCOL_MAGIC: u64 = u64::from_le_bytes(*b"FLASHIPC");
/// The frames above.
pub const PROTOCOL_VERSION: u32 = 1;

pub(crate) const REQUEST_LEN: usize = 32;
const REPLY_LEN: usize = 48;
const MAX_TEXT: usize = 512;
/// The longest reply.
pub(crate) const MAX_REPLY: usize = REPLY_LEN + MAX_TEXT;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Request {
    pub(crate) generation: u64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Reply {
    /// `Err`: refused, with the exporter's sentence.
    pub(crate) status: std::result::Result<(), (Refusal, String)>,
    /// What the descriptor is of; of a refusal nothing.
    pub(crate) memory: MemoryKind,
    pub(crate) payload: u64,
    pub(crate) capacity: u64,
    pub(crate) shards: u32,
    pub(crate) generation: u64,
}

fn array<const N: usize>(frame: &[u8], at: usize) -> Option<[u8; N]> {
    frame.get(at..at.checked_add(N)?)?.try_into().ok()
}

fn u64_at(frame: &[u8], at: usize) -> Option<u64> {
    array(frame, at).map(u64::from_le_bytes)
}

fn u32_at(frame: &[u8], at: usize) -> Option<u32> {
    array(frame, at).map(u32::from_le_bytes)
}

const HOST: u16 = 0;
const GPU: u16 = 1;

fn u16_at(frame: &[u8], at: usize) -> Option<u16> {
    array(frame, at).map(u16::from_le_bytes)
}

impl Request {
    pub(crate) fn encode(self) -> Vec<u8> {
        let mut frame = Vec::with_capacity(REQUEST_LEN);
        frame.extend(PROTOCOL_MAGIC.to_le_bytes());
        frame.extend(PROTOCOL_VERSION.to_le_bytes());
        frame.extend(0u32.to_le_bytes());
        frame.extend(self.generation.to_le_bytes());
        frame.extend(0u64.to_le_bytes());
        frame
    }

    /// Reads what a reader sent. The version is looked at before the length: another version's frame may
    /// have another.
    pub(crate) fn decode(frame: &[u8]) -> std::result::Result<Self, (Refusal, String)> {
        let malformed = |what: String| (Refusal::Malformed, what);
        if u64_at(frame, 0) != Some(PROTOCOL_MAGIC) {
            return Err(malformed(format!("{} bytes that are no request of ours", frame.len())));
        }
        match u32_at(frame, 8) {
            Some(PROTOCOL_VERSION) => {}
            Some(version) => {
                let what = format!("protocol version {version}; this exporter speaks {PROTOCOL_VERSION}");
                return Err((Refusal::Version, what));
            }
            None => return Err(malformed("a request without a version".into())),
        }
        let fields = (frame.len() == REQUEST_LEN)
            .then(|| Some((u32_at(frame, 12)?, u64_at(frame, 16)?, u64_at(frame, 24)?)))
            .flatten();
        match fields {
            Some((0, generation, 0)) => Ok(Self { generation }),
            Some((0, _, _)) => Err((Refusal::NotPermitted, "a token, and this exporter takes none".into())),
            Some(_) => Err(malformed("a reserved field that is not zero".into())),
            None => Err(malformed(format!("a request of {} bytes, not {REQUEST_LEN}", frame.len()))),
        }
    }
}

impl Reply {
    pub(crate) fn refusal(refusal: Refusal, text: impl Into<String>) -> Self {
        Self {
            status: Err((refusal, text.into())),
            memory: MemoryKind::Host,
            payload: 0,
            capacity: 0,
            shards: 0,
            generation: 0,
        }
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let (status, text) = match &self.status {
            Ok(()) => (0, ""),
            Err((refusal, text)) => (*refusal as u32, text.as_str()),
        };
        // Cut at a character's boundary.
        let text: String = text
            .chars()
            .scan(0, |bytes, c| {
                *bytes += c.len_utf8();
                (*bytes <= MAX_TEXT).then_some(c)
            })
            .collect();
        let mut frame = Vec::with_capacity(REPLY_LEN + text.len());
        frame.extend(PROTOCOL_MAGIC.to_le_bytes());
        frame.extend(PROTOCOL_VERSION.to_le_bytes());
        frame.extend(status.to_le_bytes());
        frame.extend(self.payload.to_le_bytes());
        frame.extend(self.capacity.to_le_bytes());
        frame.extend(self.shards.to_le_bytes());
        frame.extend(u16::try_from(text.len()).unwrap_or(0).to_le_bytes());
        frame.extend(if self.memory == MemoryKind::Gpu { GPU } else { HOST }.to_le_bytes());
        frame.extend(self.generation.to_le_bytes());
        frame.extend(text.into_bytes());
        frame
    }

    pub(crate) fn decode(frame: &[u8]) -> Result<Self> {
        let protocol = |what: String| Error::new(Kind::Protocol, "import", what);
        if u64_at(frame, 0) != Some(PROTOCOL_MAGIC) {
            return Err(protocol(format!("{} bytes that are no reply of ours", frame.len())));
        }
        let version = u32_at(frame, 8);
        let status = u32_at(frame, 12);
        if version != Some(PROTOCOL_VERSION) && status != Some(Refusal::Version as u32) {
            return Err(Error::new(
                Kind::Mismatch,
                "import",
                format!("a reply of another protocol version than {PROTOCOL_VERSION}"),
            )
            .with_remedy("run the same release on both sides"));
        }
        let fields = || {
            let numbers = (u64_at(frame, 16)?, u64_at(frame, 24)?, u32_at(frame, 32)?, u64_at(frame, 40)?);
            let text_len = usize::from(u16_at(frame, 36)?);
            let memory = match u16_at(frame, 38)? {
                HOST => MemoryKind::Host,
                GPU => MemoryKind::Gpu,
                _ => return None,
            };
            let text = frame.get(REPLY_LEN..)?;
            (text.len() == text_len && text_len <= MAX_TEXT).then_some((numbers, memory, text))
        };
        let (Some(status), Some((numbers, memory, text))) = (status, fields()) else {
            return Err(protocol(format!("a reply of {} bytes that does not parse", frame.len())));
        };
        let status = match status {
            0 => Ok(()),
            code => match Refusal::from_code(code) {
                // The text goes to terminals and logs: printable characters only.
                Some(refusal) => Err((
                    refusal,
                    String::from_utf8_lossy(text).chars().filter(|c| !c.is_control()).collect(),
                )),
                None => return Err(protocol(format!("a reply with the unknown status {code}"))),
            },
        };
        let (payload, capacity, shards, generation) = numbers;
        Ok(Self { status, memory, payload, capacity, shards, generation })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn no_bytes_panic(mut frame in prop::collection::vec(any::<u8>(), 0..700), ours: bool) {
            if ours {
                let head = [&PROTOCOL_MAGIC.to_le_bytes()[..], &PROTOCOL_VERSION.to_le_bytes()].concat();
                frame.splice(..head.len().min(frame.len()), head);
            }
            let _ = Request::decode(&frame);
            if let Ok(reply) = Reply::decode(&frame) {
                prop_assert!(frame.len() <= MAX_REPLY);
                if let Err((_, text)) = reply.status {
                    prop_assert!(!text.chars().any(char::is_control));
                }
            }
        }
    }

    #[test]
    fn frames_read_back() {
        let request = Request { generation: 0xfeed };
        assert_eq!(Request::decode(&request.encode()), Ok(request));
        for memory in [MemoryKind::Host, MemoryKind::Gpu] {
            let ok = Reply { status: Ok(()), memory, payload: 1, capacity: 2, shards: 3, generation: 4 };
            assert_eq!(Reply::decode(&ok.encode()), Ok(ok));
        }
        let refused = Reply::refusal(Refusal::Full, "64 readers");
        assert_eq!(Reply::decode(&refused.encode()), Ok(refused));
        let long = Reply::refusal(Refusal::Full, "ä".repeat(400)).encode();
        assert_eq!(long.len(), MAX_REPLY);
        assert!(Reply::decode(&long).is_ok());
    }

    #[test]
    fn every_wrong_request_is_refused_by_what_is_wrong() {
        let good = Request { generation: 7 }.encode();
        let with = |at: usize, byte: u8| {
            let mut frame = good.clone();
            frame[at] = byte;
            Request::decode(&frame).unwrap_err().0
        };
        assert_eq!(with(0, 0), Refusal::Malformed);
        assert_eq!(with(8, 9), Refusal::Version);
        assert_eq!(with(12, 1), Refusal::Malformed);
        assert_eq!(with(24, 1), Refusal::NotPermitted);
        for len in 0..REQUEST_LEN {
            assert_eq!(Request::decode(&good[..len]).unwrap_err().0, Refusal::Malformed, "{len}");
        }
        let long = [good, vec![0]].concat();
        assert_eq!(Request::decode(&long).unwrap_err().0, Refusal::Malformed);
    }

    #[test]
    fn no_cut_or_changed_reply_panics_or_passes_for_another() {
        let memory = MemoryKind::Gpu;
        let good =
            Reply { status: Ok(()), memory, payload: 1, capacity: 2, shards: 3, generation: 4 }.encode();
        for len in 0..good.len() {
            assert!(Reply::decode(&good[..len]).is_err(), "{len}");
        }
        for at in 0..good.len() {
            let mut frame = good.clone();
            frame[at] ^= 0xff;
            let _ = Reply::decode(&frame);
        }
        for (at, byte) in [(12, 99), (38, 2), (39, 1)] {
            let mut unknown = good.clone();
            unknown[at] = byte;
            assert_eq!(Reply::decode(&unknown).unwrap_err().kind(), Kind::Protocol, "{at}");
        }
        let mut unknown = good;
        unknown[12] = 99;
        assert_eq!(Reply::decode(&unknown).unwrap_err().kind(), Kind::Protocol);
    }
}
