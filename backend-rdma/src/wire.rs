//! The two frames of the one round trip in which a reader and its source exchange queue pairs: JSON, one frame each way
//! over a control channel, at most [`MAX_FRAME`] bytes, unknown fields refused.

use crate::{extent::Extent, verbs::LinkLayer};
use flashboot_core::{Error, Kind, MemoryKind, Result};
use serde::{Deserialize, Serialize};

/// Named in both frames; another one is refused before anything else is looked at.
pub const PROTOCOL_VERSION: u32 = 1;
/// The longest frame.
pub(crate) const MAX_FRAME: usize = 256 << 10;
/// Devices that one reader may bring.
pub(crate) const MAX_RAILS: usize = 16;
const MAX_TEXT: usize = 512;
const MASK_24: u32 = 0xff_ffff;

/// How to reach one queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Address {
    /// The queue pair, 24 bits.
    pub(crate) number: u32,
    /// The number of the first packet that it sends, 24 bits.
    pub(crate) psn: u32,
    pub(crate) gid: [u8; 16],
    pub(crate) lid: u16,
    pub(crate) link: LinkLayer,
    /// `ibv_mtu`.
    pub(crate) mtu: u32,
    /// READs that it may have coming in at once.
    pub(crate) reads_in: u8,
    /// What the packets of this end carry.
    pub(crate) traffic_class: u8,
}

impl Address {
    fn is_sound(&self) -> bool {
        self.number <= MASK_24
            && self.psn <= MASK_24
            && (1..=5).contains(&self.mtu)
            && (self.gid != [0; 16] || self.lid != 0)
    }
}

/// What a reader asks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Request {
    pub(crate) version: u32,
    pub(crate) generation: u64,
    /// One queue pair for each of its devices.
    pub(crate) pairs: Vec<Address>,
}

/// What a source answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "lowercase")]
pub(crate) enum Reply {
    Attached(Box<Attached>),
    Refused { version: u32, why: Refusal, text: String },
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Attached {
    pub(crate) version: u32,
    pub(crate) generation: u64,
    pub(crate) payload: u64,
    pub(crate) capacity: u64,
    pub(crate) shards: u32,
    pub(crate) memory: MemoryKind,
    pub(crate) extent: Extent,
    /// The source's end of each of the reader's pairs, in its order.
    pub(crate) pairs: Vec<Lane>,
}

/// The source's end of one queue pair, and the keys of its regions on that device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Lane {
    pub(crate) address: Address,
    pub(crate) keys: Vec<u32>,
}

/// Why a source refuses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Refusal {
    StaleGeneration,
    Malformed,
    Version,
    Full,
    /// No queue pair could be connected.
    Fabric,
}

impl Refusal {
    fn into_error(self, said: &str) -> Error {
        let (kind, remedy) = match self {
            Self::StaleGeneration => (Kind::StaleGeneration, "fetch a fresh locator from the exporter"),
            Self::Malformed => (Kind::Protocol, "run the same release on both sides"),
            Self::Version => (Kind::Mismatch, "run the same release on both sides"),
            Self::Full => (Kind::Busy, "try again later, or raise the exporter's rdma.max_readers"),
            Self::Fabric => (
                Kind::Unavailable,
                "check that both hosts are on one fabric, and rdma.devices and rdma.gid_index at both",
            ),
        };
        // The text goes to terminals and logs: printable characters only.
        let said: String = said.chars().filter(|c| !c.is_control()).take(MAX_TEXT).collect();
        Error::new(kind, "import", format!("the exporter refuses: {said}")).with_remedy(remedy)
    }
}

/// The version alone, which stays where it is in every release.
#[derive(Deserialize)]
struct Versioned {
    version: u32,
}

impl Request {
    pub(crate) fn new(generation: u64, pairs: Vec<Address>) -> Self {
        Self { version: PROTOCOL_VERSION, generation, pairs }
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        // Integers and lists: serialising cannot fail.
        serde_json::to_vec(self).unwrap_or_default()
    }

    pub(crate) fn decode(frame: &[u8]) -> Result<Self, (Refusal, String)> {
        let parsed: Result<Self, _> = serde_json::from_slice(frame);
        match parsed {
            Ok(request) if request.version != PROTOCOL_VERSION => Err(version(request.version)),
            Ok(request) => {
                let sound = (1..=MAX_RAILS).contains(&request.pairs.len())
                    && request.pairs.iter().all(Address::is_sound);
                let what = "numbers that no queue pair has";
                if sound { Ok(request) } else { Err((Refusal::Malformed, what.into())) }
            }
            Err(e) => match serde_json::from_slice::<Versioned>(frame) {
                Ok(other) if other.version != PROTOCOL_VERSION => Err(version(other.version)),
                _ => Err((Refusal::Malformed, format!("a request that does not parse: {e}"))),
            },
        }
    }
}

fn version(found: u32) -> (Refusal, String) {
    let what = format!("protocol version {found}; this exporter speaks {PROTOCOL_VERSION}");
    (Refusal::Version, what)
}

impl Reply {
    pub(crate) fn refused(why: Refusal, text: impl Into<String>) -> Self {
        let text = text.into().chars().take(MAX_TEXT).collect();
        Self::Refused { version: PROTOCOL_VERSION, why, text }
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// Reads an answer to a request with `asked` pairs; a refusal is its error.
    ///
    /// # Errors
    /// [`Kind::Protocol`] for what is no answer, and whatever the source refuses with.
    pub(crate) fn decode(frame: &[u8], asked: usize) -> Result<Attached> {
        let protocol = |what: String| Err(Error::new(Kind::Protocol, "import", what));
        let attached = match serde_json::from_slice(frame) {
            Ok(Self::Attached(attached)) => *attached,
            Ok(Self::Refused { why, text, .. }) => return Err(why.into_error(&text)),
            Err(e) => return protocol(format!("a reply of {} bytes that does not parse: {e}", frame.len())),
        };
        if attached.version != PROTOCOL_VERSION {
            return Err(why_version(attached.version));
        }
        let regions = attached.extent.is_sound().then(|| attached.extent.regions());
        let lane = |lane: &Lane| lane.address.is_sound() && Some(lane.keys.len() as u64) == regions;
        let sound = attached.pairs.len() == asked
            && attached.extent.len == attached.capacity
            && attached.payload <= attached.capacity
            && attached.pairs.iter().all(lane);
        if !sound {
            return protocol("a reply whose numbers do not fit each other".into());
        }
        Ok(attached)
    }
}

fn why_version(found: u32) -> Error {
    let (refusal, what) = version(found);
    refusal.into_error(&what)
}

/// For the fuzz target: neither parser may panic, and what a reply says must be usable.
#[doc(hidden)]
pub fn fuzz_frames(frame: &[u8]) {
    let _ = Request::decode(frame);
    for asked in 1..3 {
        if let Ok(attached) = Reply::decode(frame, asked) {
            for (start, len) in attached.extent.parts().take(8) {
                assert!(len > 0 && start.checked_add(len).is_some());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn address() -> Address {
        Address {
            number: 17,
            psn: 0xabcdef,
            gid: [9; 16],
            lid: 0,
            link: LinkLayer::Ethernet,
            mtu: 5,
            reads_in: 16,
            traffic_class: 106,
        }
    }

    fn attached() -> Attached {
        Attached {
            version: PROTOCOL_VERSION,
            generation: 7,
            payload: 100,
            capacity: 8192,
            shards: 1,
            memory: MemoryKind::Host,
            extent: Extent { address: 1 << 40, len: 8192, split: 4096 },
            pairs: vec![Lane { address: address(), keys: vec![1, 2] }],
        }
    }

    #[test]
    fn frames_read_back() {
        let request = Request::new(7, vec![address()]);
        assert_eq!(Request::decode(&request.encode()), Ok(request));
        let reply = Reply::Attached(Box::new(attached()));
        assert_eq!(Reply::decode(&reply.encode(), 1), Ok(attached()));
        let refused = Reply::decode(&Reply::refused(Refusal::Full, "many\u{7}").encode(), 1).unwrap_err();
        assert_eq!((refused.kind(), refused.detail()), (Kind::Busy, "the exporter refuses: many"));
    }

    #[test]
    fn every_wrong_request_is_refused_by_what_is_wrong() {
        let with = |change: fn(&mut Request)| {
            let mut request = Request::new(7, vec![address()]);
            change(&mut request);
            Request::decode(&request.encode()).unwrap_err().0
        };
        assert_eq!(with(|r| r.version = 9), Refusal::Version);
        assert_eq!(with(|r| r.pairs.clear()), Refusal::Malformed);
        assert_eq!(with(|r| r.pairs[0].number = 1 << 24), Refusal::Malformed);
        assert_eq!(with(|r| r.pairs[0].mtu = 6), Refusal::Malformed);
        assert_eq!(with(|r| r.pairs[0].gid = [0; 16]), Refusal::Malformed);
        assert_eq!(with(|r| r.pairs = vec![r.pairs[0]; MAX_RAILS + 1]), Refusal::Malformed);
        let newer = br#"{"version": 2, "other": true}"#;
        assert_eq!(Request::decode(newer).unwrap_err().0, Refusal::Version);
        let unknown = br#"{"version": 1, "generation": 1, "pairs": [], "more": 1}"#;
        assert_eq!(Request::decode(unknown).unwrap_err().0, Refusal::Malformed);
    }

    #[test]
    fn a_reply_whose_numbers_cannot_be_is_refused() {
        let kind = |change: fn(&mut Attached)| {
            let mut attached = attached();
            change(&mut attached);
            Reply::decode(&Reply::Attached(Box::new(attached)).encode(), 1).unwrap_err().kind()
        };
        assert_eq!(kind(|a| a.version = 2), Kind::Mismatch);
        assert_eq!(kind(|a| a.pairs.clear()), Kind::Protocol);
        assert_eq!(kind(|a| a.pairs[0].keys.clear()), Kind::Protocol);
        assert_eq!(kind(|a| a.extent.split = 0), Kind::Protocol);
        assert_eq!(kind(|a| a.extent.len = 4096), Kind::Protocol);
        assert_eq!(kind(|a| a.extent.address = u64::MAX), Kind::Protocol);
        assert_eq!(kind(|a| a.payload = 8193), Kind::Protocol);
    }

    proptest! {
        #[test]
        fn no_bytes_panic(frame in prop::collection::vec(any::<u8>(), 0..300)) {
            fuzz_frames(&frame);
        }

        #[test]
        fn no_changed_byte_of_a_frame_panics(at: prop::sample::Index, to: u8, cut: prop::sample::Index) {
            for mut frame in [Request::new(7, vec![address()]).encode(), Reply::Attached(Box::new(attached())).encode()] {
                let at = at.index(frame.len());
                frame[at] = to;
                fuzz_frames(&frame);
                fuzz_frames(&frame[..cut.index(frame.len())]);
            }
        }
    }
}
