//! The read protocol, inside a channel of purpose `tcp`. Every number is little-endian.
//!
//! A reader's first frame on every connection is an [`Attach`]; the source answers with an [`Attached`]. Then
//!
//! - on a connection for watching, the reader sends [`Look`]s, and the source answers each with a [`Seen`] once its word is
//!   far enough, its filling is another, or the look's wait is over;
//! - on a connection for reading, the reader sends [`Read`]s, several ahead if it likes, and the source answers each, in
//!   order, with an [`Answer`]'s [`ANSWER`] bytes and then as many bytes as that says.
//!
//! A reader may send its first look before it has the source's answer to the attaching. Frames have the channel's length
//! prefix; an answer to a read has none, so that the payload needs no copy to follow it.

use flashboot_core::{ByteRange, Error, Kind, MemoryKind, Result};

/// The longest frame of either side.
pub const MAX_FRAME: usize = 256;
/// The most bytes that one read asks for.
pub const MAX_READ: u64 = 4 << 20;
/// The most looks that one connection may have waiting.
pub const MAX_LOOKS: usize = 64;
/// Bytes of an [`Answer`].
pub const ANSWER: usize = 16;
/// The longest text of a refusal.
const MAX_TEXT: usize = 200;

const ATTACH: u8 = 1;
const LOOK: u8 = 2;
const READ: u8 = 3;
const HOST: u16 = 0;
const GPU: u16 = 1;

/// What a connection is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lane {
    /// Looks at the source's words.
    Watch,
    /// Reads of payload.
    Read,
}

/// A reader's first frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attach {
    /// What the connection is for.
    pub lane: Lane,
    /// The filling it wants.
    pub generation: u64,
}

/// What the source has, or why the reader may not have it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attached {
    /// Why not.
    pub refused: Option<(Refusal, String)>,
    /// The kind of memory; of a refusal nothing below means anything.
    pub memory: MemoryKind,
    /// Number of progress words.
    pub shards: u32,
    /// Payload bytes.
    pub payload: u64,
    /// Bytes of the allocation.
    pub capacity: u64,
    /// The filling.
    pub generation: u64,
}

/// Why a source refuses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u16)]
pub enum Refusal {
    /// The filling is not exported here, or not any more.
    NotExported = 1,
    /// The arena holds another filling by now.
    Stale = 2,
    /// Too many readers.
    Full = 3,
    /// The frame does not parse, or asks for what is not there.
    Malformed = 4,
    /// The source could not read its own memory.
    Failed = 5,
}

/// Wants to know a word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Look {
    /// The reader's number for it.
    pub id: u32,
    /// Which word.
    pub shard: u32,
    /// How far it is to be.
    pub at_least: u64,
    /// How long the answer may wait for that, in milliseconds.
    pub wait_ms: u32,
}

/// What a word was.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Seen {
    /// The look's number.
    pub id: u32,
    /// The filling; 0 when retired.
    pub generation: u64,
    /// The word.
    pub progress: u64,
}

/// Wants payload bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Read {
    /// Of this filling.
    pub generation: u64,
    /// From this byte on.
    pub start: u64,
    /// This many, at most [`MAX_READ`].
    pub len: u32,
}

/// What comes before the bytes that were asked for, or before the text of a refusal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Answer {
    /// Why there are no payload bytes.
    pub refused: Option<Refusal>,
    /// Bytes that follow.
    pub len: u32,
    /// Where they belong.
    pub start: u64,
}

/// What a reader may say once it is attached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Request {
    /// See [`Look`].
    Look(Look),
    /// See [`Read`].
    Read(Read),
}

impl Refusal {
    fn from_code(code: u16) -> Option<Self> {
        Some(match code {
            1 => Self::NotExported,
            2 => Self::Stale,
            3 => Self::Full,
            4 => Self::Malformed,
            5 => Self::Failed,
            _ => return None,
        })
    }

    /// As the boundary's error. The reader may find what it needs elsewhere but for what is its own fault.
    pub fn into_error(self, op: &'static str, said: &str, peer: &str) -> Error {
        let kind = match self {
            Self::NotExported | Self::Stale => Kind::StaleGeneration,
            Self::Full | Self::Failed => Kind::SourceLost,
            Self::Malformed => Kind::Protocol,
        };
        Error::new(kind, op, format!("the source refused: {said}")).with_peer(peer)
    }
}

/// The bytes of one frame, taken from its front.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (taken, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*taken)
    }

    fn u8(&mut self) -> Option<u8> {
        self.take::<1>().map(|[byte]| byte)
    }

    fn u16(&mut self) -> Option<u16> {
        self.take().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_le_bytes)
    }

    fn end(&self) -> Option<()> {
        self.0.is_empty().then_some(())
    }
}

fn malformed(op: &'static str, what: &str, frame: &[u8]) -> Error {
    Error::new(Kind::Protocol, op, format!("a frame of {} bytes is no {what}", frame.len()))
}

impl Attach {
    /// As it is sent.
    pub fn encode(&self) -> Vec<u8> {
        let lane = match self.lane {
            Lane::Watch => 0,
            Lane::Read => 1,
        };
        [&[ATTACH, lane, 0, 0][..], &self.generation.to_le_bytes()].concat()
    }

    /// Reads what a reader sent.
    pub fn decode(frame: &[u8]) -> Result<Self> {
        let read = |mut fields: Fields<'_>| {
            let (kind, lane, reserved) = (fields.u8()?, fields.u8()?, fields.u16()?);
            let generation = fields.u64()?;
            fields.end()?;
            let lane = match lane {
                0 => Lane::Watch,
                1 => Lane::Read,
                _ => return None,
            };
            (kind == ATTACH && reserved == 0).then_some(Self { lane, generation })
        };
        read(Fields(frame)).ok_or_else(|| malformed("attach", "request to attach", frame))
    }
}

impl Attached {
    /// A refusal.
    pub fn refusal(refusal: Refusal, text: impl Into<String>) -> Self {
        let refused = Some((refusal, text.into()));
        Self { refused, memory: MemoryKind::Host, shards: 0, payload: 0, capacity: 0, generation: 0 }
    }

    /// As it is sent; a text that is too long is cut.
    pub fn encode(&self) -> Vec<u8> {
        let (status, text) = match &self.refused {
            None => (0, ""),
            Some((refusal, text)) => (*refusal as u16, cut(text)),
        };
        let memory = if self.memory == MemoryKind::Gpu { GPU } else { HOST };
        let mut frame = Vec::with_capacity(32 + text.len());
        frame.extend(status.to_le_bytes());
        frame.extend(memory.to_le_bytes());
        frame.extend(self.shards.to_le_bytes());
        for field in [self.payload, self.capacity, self.generation] {
            frame.extend(field.to_le_bytes());
        }
        frame.extend(text.as_bytes());
        frame
    }

    /// Reads what a source sent.
    pub fn decode(frame: &[u8]) -> Result<Self> {
        let read = |mut fields: Fields<'_>| {
            let (status, memory, shards) = (fields.u16()?, fields.u16()?, fields.u32()?);
            let (payload, capacity, generation) = (fields.u64()?, fields.u64()?, fields.u64()?);
            let memory = match memory {
                HOST => MemoryKind::Host,
                GPU => MemoryKind::Gpu,
                _ => return None,
            };
            let text = fields.0;
            let refused = match status {
                0 if text.is_empty() => None,
                0 => return None,
                _ if text.len() > MAX_TEXT => return None,
                code => Some((Refusal::from_code(code)?, printable(text))),
            };
            Some(Self { refused, memory, shards, payload, capacity, generation })
        };
        read(Fields(frame)).ok_or_else(|| malformed("attach", "answer of a source", frame))
    }
}

impl Request {
    /// As it is sent.
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Self::Look(look) => {
                let mut frame = vec![LOOK, 0, 0, 0];
                frame.extend(look.id.to_le_bytes());
                frame.extend(look.shard.to_le_bytes());
                frame.extend(look.wait_ms.to_le_bytes());
                frame.extend(look.at_least.to_le_bytes());
                frame
            }
            Self::Read(read) => {
                let mut frame = vec![READ, 0, 0, 0];
                frame.extend(read.len.to_le_bytes());
                frame.extend(read.generation.to_le_bytes());
                frame.extend(read.start.to_le_bytes());
                frame
            }
        }
    }

    /// Reads what a reader sent.
    pub fn decode(frame: &[u8]) -> Result<Self> {
        let read = |mut fields: Fields<'_>| {
            let [kind, 0, 0, 0] = fields.take::<4>()? else { return None };
            let request = match kind {
                LOOK => {
                    let (id, shard, wait_ms) = (fields.u32()?, fields.u32()?, fields.u32()?);
                    Self::Look(Look { id, shard, wait_ms, at_least: fields.u64()? })
                }
                READ => {
                    let (len, generation, start) = (fields.u32()?, fields.u64()?, fields.u64()?);
                    Self::Read(Read { generation, start, len })
                }
                _ => return None,
            };
            fields.end().map(|()| request)
        };
        read(Fields(frame)).ok_or_else(|| malformed("serve", "request of a reader", frame))
    }
}

impl Read {
    /// The bytes asked for, if a payload of `payload` bytes has them and they are no more than may be asked for at once.
    pub fn range(&self, payload: u64) -> Option<ByteRange> {
        let end = self.start.checked_add(self.len.into())?;
        let fits = u64::from(self.len) <= MAX_READ && end <= payload;
        fits.then(|| ByteRange::new(self.start, end))
    }
}

impl Seen {
    /// As it is sent.
    pub fn encode(&self) -> Vec<u8> {
        [&self.id.to_le_bytes()[..], &self.generation.to_le_bytes(), &self.progress.to_le_bytes()].concat()
    }

    /// Reads what a source sent.
    pub fn decode(frame: &[u8]) -> Result<Self> {
        let read = |mut fields: Fields<'_>| {
            let (id, generation, progress) = (fields.u32()?, fields.u64()?, fields.u64()?);
            fields.end().map(|()| Self { id, generation, progress })
        };
        read(Fields(frame)).ok_or_else(|| malformed("observe", "answer to a look", frame))
    }
}

impl Answer {
    /// That `range` follows.
    pub fn granted(read: &Read) -> Self {
        Self { refused: None, len: read.len, start: read.start }
    }

    /// A refusal with its text, as both are sent.
    pub fn refusal(read: &Read, refusal: Refusal, text: &str) -> Vec<u8> {
        let text = cut(text);
        let len = u32::try_from(text.len()).unwrap_or(0);
        let head = Self { refused: Some(refusal), len, start: read.start }.encode();
        [&head[..], text.as_bytes()].concat()
    }

    /// As it is sent.
    pub fn encode(&self) -> [u8; ANSWER] {
        let mut out = [0; ANSWER];
        let status = self.refused.map_or(0, |refusal| refusal as u16).to_le_bytes();
        let (len, start) = (self.len.to_le_bytes(), self.start.to_le_bytes());
        let fields = status.iter().chain(&[0, 0]).chain(&len).chain(&start);
        out.iter_mut().zip(fields).for_each(|(slot, byte)| *slot = *byte);
        out
    }

    /// Reads what a source sent in answer to `asked`: the very bytes asked for, or a refusal.
    pub fn decode(bytes: &[u8; ANSWER], asked: &Read) -> Result<Self> {
        let read = |mut fields: Fields<'_>| {
            let (status, reserved, len, start) = (fields.u16()?, fields.u16()?, fields.u32()?, fields.u64()?);
            let refused = match status {
                0 => None,
                code => Some(Refusal::from_code(code)?),
            };
            let len_fits = match refused {
                None => len == asked.len,
                Some(_) => len as usize <= MAX_TEXT,
            };
            (reserved == 0 && start == asked.start && len_fits).then_some(Self { refused, len, start })
        };
        read(Fields(bytes)).ok_or_else(|| {
            let detail = format!("what came is no answer for {} bytes from {}", asked.len, asked.start);
            Error::new(Kind::Protocol, "read", detail)
        })
    }
}

fn cut(text: &str) -> &str {
    let mut end = text.len().min(MAX_TEXT);
    while !text.is_char_boundary(end) {
        end = end.saturating_sub(1);
    }
    text.get(..end).unwrap_or_default()
}

/// A peer's text, for terminals and logs.
pub(crate) fn printable(text: &[u8]) -> String {
    String::from_utf8_lossy(text).chars().filter(|c| !c.is_control()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn whatever_decodes_encodes_to_the_same_bytes(mut frame in prop::collection::vec(any::<u8>(), 0..300), kind in 0u8..4) {
            if let Some(first) = frame.first_mut() {
                *first = kind;
            }
            for byte in frame.iter_mut().take(4).skip(1) {
                *byte &= 1;
            }
            if let Ok(read) = Attach::decode(&frame) {
                prop_assert_eq!(read.encode(), &frame[..]);
            }
            if let Ok(read) = Request::decode(&frame) {
                prop_assert_eq!(read.encode(), &frame[..]);
            }
            if let Ok(read) = Seen::decode(&frame) {
                prop_assert_eq!(read.encode(), &frame[..]);
            }
            if let Ok(read) = Attached::decode(&frame) {
                prop_assert!(frame.len() <= MAX_FRAME);
                // A text that was no UTF-8 may be another now.
                prop_assert!(Attached::decode(&read.encode()).is_ok());
            }
        }

        #[test]
        fn a_read_is_within_the_payload_or_refused(start: u64, len: u32, payload: u64) {
            if let Some(range) = (Read { generation: 1, start, len }).range(payload) {
                prop_assert!(range.end <= payload && range.len() <= MAX_READ && range.start == start);
            }
        }

        #[test]
        fn an_answer_is_of_what_was_asked(bytes: [u8; ANSWER], start: u64, len in 0u32..10_000) {
            let asked = Read { generation: 1, start, len };
            if let Ok(answer) = Answer::decode(&bytes, &asked) {
                prop_assert!(answer.start == start && (answer.len == len || answer.refused.is_some() && answer.len <= 200));
            }
            prop_assert_eq!(Answer::decode(&Answer::granted(&asked).encode(), &asked), Ok(Answer::granted(&asked)));
        }
    }

    #[test]
    fn texts_are_cut_and_printable() {
        let long = Attached::refusal(Refusal::Full, "ä\u{7}".repeat(300)).encode();
        assert!(long.len() <= MAX_FRAME);
        let (refusal, text) = Attached::decode(&long).unwrap().refused.unwrap();
        assert_eq!(refusal, Refusal::Full);
        assert!(text.chars().all(|c| c == 'ä') && !text.is_empty());
        let read = Read { generation: 1, start: 7, len: 9 };
        let bytes = Answer::refusal(&read, Refusal::Stale, &"x".repeat(300));
        let answer = Answer::decode(bytes.first_chunk().unwrap(), &read).unwrap();
        assert_eq!((answer.refused, answer.len as usize), (Some(Refusal::Stale), bytes.len() - ANSWER));
    }
}
