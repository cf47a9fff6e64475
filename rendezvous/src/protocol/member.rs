//! What a member says of itself, and what it is told of others.

use flashboot_core::{Generation, TransportName};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};
use std::fmt;

/// A member: one filling of one arena. As text 16 hexadecimal digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MemberId(pub Generation);

impl fmt::Display for MemberId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

impl Serialize for MemberId {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for MemberId {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let text = String::deserialize(d)?;
        let digits = text.len() == 16 && text.bytes().all(|b| b.is_ascii_hexdigit());
        let word = digits.then(|| u64::from_str_radix(&text, 16).ok()).flatten();
        word.and_then(Generation::from_word)
            .map(Self)
            .ok_or_else(|| D::Error::custom("a member is 16 hexadecimal digits, not all of them 0"))
    }
}

/// Which bytes: two members with the same content hold the same bytes.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Content {
    /// The image's id, 64 hexadecimal digits.
    pub image: String,
    /// The rank image's name (`target-0-0-0-0`).
    pub rank: String,
    /// What people call the model.
    pub model: String,
    /// Which edition of it; empty where nobody said.
    pub revision: String,
    /// What must agree before the bytes may be used: the image's fingerprint as text.
    pub fingerprint: String,
    /// Payload bytes.
    pub bytes: u64,
    /// BLAKE3 of the manifest (the image's metadata and the rank's table), 64 hexadecimal digits.
    pub manifest: String,
    /// Bytes of the manifest.
    pub manifest_bytes: u64,
}

/// What a clone asks for.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Wanted {
    /// The image's id.
    pub image: Option<String>,
    /// The model's name.
    pub model: Option<String>,
    /// The model's edition; any where it is not said.
    pub revision: Option<String>,
    /// The rank image's name; the only one where it is not said.
    pub rank: Option<String>,
}

impl Wanted {
    /// Whether `content` is what is asked for.
    pub fn fits(&self, content: &Content) -> bool {
        let same = |asked: &Option<String>, is: &str| asked.as_ref().is_none_or(|asked| asked == is);
        same(&self.image, &content.image)
            && same(&self.model, &content.model)
            && same(&self.revision, &content.revision)
            && same(&self.rank, &content.rank)
    }
}

/// Where a member's memory is.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Place {
    /// The host's boot id.
    pub host: String,
    /// The GPU's UUID; `None`: host memory.
    pub gpu: Option<String>,
    /// Names of the host's network devices.
    pub nics: Vec<String>,
    /// The NVLink domain's label.
    pub domain: Option<String>,
    /// The rail's label.
    pub rail: Option<String>,
    /// The rack's label.
    pub rack: Option<String>,
}

/// What a member is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// It holds the whole content from the start.
    Seed,
    /// It reads it.
    Clone,
}

/// All that a member says when it registers, the first time and whenever the service does not know it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Registration {
    /// Its arena's filling.
    pub member: MemberId,
    /// Random, known to the member and the service only: whoever has it is the member.
    pub secret: u64,
    /// A name that stays through restarts, where it has one: a later member of the name replaces an earlier.
    pub name: Option<String>,
    /// What it is.
    pub role: Role,
    /// What it holds or is to hold.
    pub content: Content,
    /// Verified bytes from the payload's start.
    pub holds: u64,
    /// Where.
    pub place: Place,
    /// A locator for every transport it can be read by.
    pub locators: Vec<String>,
    /// The transports it can read by.
    pub transports: Vec<TransportName>,
    /// Readers that it serves at once at most.
    pub readers: u32,
    /// A clone's: begin when so many have come; `None`: at once.
    pub expect: Option<u32>,
    /// Whom it reads from already: where the service was away, or the member found itself another source.
    pub upstream: Option<MemberId>,
    /// The last plan's number that it has, 0 before the first.
    pub epoch: u32,
    /// The trace that its spans are of: up to 32 hexadecimal digits. Others' spans about it carry it too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trace: Option<String>,
    /// The most bytes a second that it sends by tcp, which it enforces itself; `None`: no bound.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate: Option<u64>,
}

/// What its readers say of a member's bytes, as it is told itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Blame {
    /// How many of them found blocks that do not match their digests.
    pub readers: u32,
    /// Two of them did: it is given to nobody any more.
    pub withdrawn: bool,
}

impl Blame {
    /// Whether nobody found anything.
    pub fn is_none(&self) -> bool {
        *self == Self::default()
    }
}

/// One that reads from a member, or did of late.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reader {
    /// Who.
    pub member: MemberId,
    /// The trace that it named.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trace: Option<String>,
    /// Whether it still reads.
    pub reads: bool,
}

/// Why a source was given up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Cause {
    /// It gave wrong bytes, or holds another filling: it is never asked again by whom it gave them to.
    Refused,
    /// It is gone, does not answer, or stands still.
    Lost,
}

/// One that holds a part of the content, as others are told of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holder {
    /// Who.
    pub member: MemberId,
    /// Verified bytes from the payload's start, when it last said so.
    pub holds: u64,
    /// Whether that is all.
    pub complete: bool,
    /// How it can be read.
    pub locators: Vec<String>,
}

/// What a clone is to do, and whom it may turn to while the service is away.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// Counts this member's plans, from 1.
    pub epoch: u32,
    /// Changes whenever the membership does.
    pub membership: u64,
    /// Whom to read from.
    pub upstream: MemberId,
    /// The upstream first, then its own upstreams up to one that reads from nobody, then others that hold all.
    pub holders: Vec<Holder>,
}
