//! Configuration as plain structs: units live in the types, unknown keys are errors.
//!
//! A face merges its sources (defaults, file, environment, flags) into one [`Config`]; nothing here knows where
//! a value came from.

use crate::{
    network::{Etcd, Network, Rdma, Security, Tcp},
    observe::Http,
};
use flashboot_core::{BLOCK, ByteSize, TransportName, replica::Policy, schedule::Schedule};
use flashboot_driver::Floor;
use flashboot_loader::budget::Budget;
pub use flashboot_loader::source::SourceKind;
use serde::{Deserialize, Serialize};
use std::{fmt, path::PathBuf, str::FromStr, time::Duration};

/// Everything that can be configured.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Where fetched models are kept; `None`: `$XDG_CACHE_HOME/flashboot`, else `~/.cache/flashboot`.
    pub cache: Option<PathBuf>,
    /// Logs.
    pub log: Log,
    /// Arenas in host memory.
    pub memory: Memory,
    /// Loading.
    pub load: Load,
    /// Packing and reading checkpoints.
    pub pack: Pack,
    /// Replication.
    pub replicate: Replicate,
    /// The `tcp` transport.
    pub tcp: Tcp,
    /// The `rdma` transport.
    pub rdma: Rdma,
    /// What protects channels between hosts.
    pub security: Security,
    /// The etcd that says where the replication service is, for `--rendezvous etcd://…`.
    pub etcd: Etcd,
    /// Metrics and health of processes that run for long.
    pub http: Http,
    /// The node agent: for itself, its clients, and loads.
    pub agent: Agent,
}

impl Config {
    /// Everything about the network.
    pub fn network(&self) -> Network {
        let Self { tcp, rdma, security, etcd, .. } = self.clone();
        Network { tcp, rdma, security, etcd }
    }
}

/// Logs, on stderr.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Log {
    /// A level (`error`, `warn`, `info`, `debug`, `trace`) or a filter such as `warn,flashboot_driver=debug`.
    pub level: String,
    /// How lines look.
    pub format: LogFormat,
}

impl Default for Log {
    fn default() -> Self {
        Self { level: "warn".into(), format: LogFormat::Text }
    }
}

/// How a log line looks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// One JSON object a line.
    Json,
}

/// Arenas in host memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Memory {
    /// Which pages they are made of.
    pub pages: Pages,
    /// The NUMA node they are bound to; `None`: pages lie where they are first touched.
    pub numa_node: Option<u32>,
    /// Threads that fault pages in and copy; `None`: one a core.
    pub threads: Option<u32>,
}

/// Which pages an arena is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Pages {
    /// Huge pages when enough are free, base pages otherwise.
    #[default]
    Auto,
    /// Base pages.
    Base,
    /// Huge pages or an error.
    Huge,
}

/// Loading one rank into memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Load {
    /// Where it may come from, in order.
    #[serde(deserialize_with = "sources")]
    pub sources: Vec<SourceKind>,
    /// Which system calls read files.
    pub engine: ReadEngine,
    /// Whether files are read past the page cache where they can be.
    pub direct: bool,
    /// Bytes in flight: pinned windows, slabs.
    pub budget: ByteSize,
    /// Bytes of one pinned window.
    pub window: ByteSize,
    /// Bytes of one request to an object store.
    pub range: ByteSize,
    /// How often one range of an object is asked for.
    pub attempts: u32,
    /// The longest one attempt may take.
    #[serde(with = "duration")]
    pub attempt_timeout: Duration,
    /// Whether objects may be fetched over plain HTTP from another host.
    pub allow_http: bool,
    /// How an arena is used that the agent holds.
    pub attach: Attach,
    /// Whether the agent copies what it has staged into a GPU; else the load does, by itself.
    pub push: bool,
    /// What the agent gives up for the load's memory has a lower one, or the same one and is not held.
    pub priority: i32,
}

/// How an arena is used that the agent holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Attach {
    /// Where it is, read-only, with whoever else has it.
    #[default]
    Shared,
    /// As a copy of one's own, for engines that write their weights.
    Private,
}

/// The node agent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Agent {
    /// Where its socket lies; `None`: `/run/user/UID/flashboot`, or `/tmp/flashboot-UID` where the system has no such.
    pub directory: Option<PathBuf>,
    /// Users, besides one's own, that may use it; for its clients those, besides one's own and root, that it may be.
    pub allow_uids: Vec<u32>,
    /// Groups, as `allow_uids`.
    pub allow_gids: Vec<u32>,
    /// The most bytes of host memory that it keeps; `None`: three quarters of what there is when it starts.
    pub limit: Option<ByteSize>,
    /// Clients at a time.
    pub clients: u32,
    /// Pin what was staged at once, for this GPU and others; `None`: when it is pushed first.
    pub pin: Option<String>,
}

impl Default for Agent {
    /// Our own user's, and 1,024 clients.
    fn default() -> Self {
        Self {
            directory: None,
            allow_uids: Vec::new(),
            allow_gids: Vec::new(),
            limit: None,
            clients: 1024,
            pin: None,
        }
    }
}

impl Default for Load {
    /// Every kind of source in the order of [`SourceKind::ALL`]; direct reads, by io_uring where there is one; 6 GB in flight, windows of
    /// 4 MiB; objects in ranges of 8 MiB, four attempts of 30 s each.
    fn default() -> Self {
        Self {
            sources: SourceKind::ALL.to_vec(),
            engine: ReadEngine::Auto,
            direct: true,
            budget: Budget::DEFAULT,
            window: ByteSize::mib(4),
            range: ByteSize::mib(8),
            attempts: 4,
            attempt_timeout: Duration::from_secs(30),
            allow_http: false,
            attach: Attach::Shared,
            push: true,
            priority: 0,
        }
    }
}

/// Which system calls read files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ReadEngine {
    /// io_uring where it works, pread otherwise.
    #[default]
    Auto,
    /// pread.
    Pread,
    /// io_uring or an error.
    IoUring,
}

/// Reading and packing checkpoints.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Pack {
    /// The longest safetensors header that is read.
    pub header_cap: ByteSize,
    /// Whether bytes after a shard's last tensor are accepted and carried along.
    pub allow_trailing: bool,
}

impl Default for Pack {
    /// 100 MB, the format's own limit; no trailing bytes.
    fn default() -> Self {
        Self { header_cap: ByteSize(100_000_000), allow_trailing: false }
    }
}

/// Replication.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Replicate {
    /// Number of clones.
    pub clones: u32,
    /// Which memory the arenas of seed and clones are in.
    pub device: Devices,
    /// Who reads from whom.
    pub topology: Topology,
    /// Clones in one chain of a tree.
    pub tree_length: u32,
    /// Chain heads that read from one chain head of a tree.
    pub tree_fanout: u32,
    /// Bytes of one copy.
    pub chunk: Chunk,
    /// The transport.
    pub transport: Choice,
    /// What `auto` may choose; empty: everything but the mock.
    #[serde(deserialize_with = "names")]
    pub allow: Vec<TransportName>,
    /// Whether every block is hashed on arrival. Off is for benchmarks only.
    pub verify: bool,
    /// Pulls in flight at one clone.
    pub depth: u32,
    /// How long a source's progress may stand still.
    #[serde(with = "duration")]
    pub stall: Duration,
    /// The fewest bytes a second that a clone's source may give while others could give more; 0: any pace will do.
    pub floor: ByteSize,
    /// Over how long that is measured.
    #[serde(with = "duration")]
    pub floor_window: Duration,
    /// How often one chunk is pulled again from one source after its digest did not match.
    pub repairs: u32,
    /// How many sources one clone may lose before it gives up.
    pub max_losses: u32,
    /// The longest one pull may take.
    #[serde(with = "duration")]
    pub pull_timeout: Duration,
    /// The longest one import of a source may take.
    #[serde(with = "duration")]
    pub import_timeout: Duration,
    /// The longest set-up may take: arenas made, the image loaded, every source mapped.
    #[serde(with = "duration")]
    pub setup_timeout: Duration,
    /// The longest the transfer may take, from the release to the last clone.
    #[serde(with = "duration")]
    pub transfer_timeout: Duration,
}

impl Default for Replicate {
    /// One clone by `auto`, verified, with [`Policy::default`]'s limits and no floor; 10 min for set-up, 10 min for transfer.
    fn default() -> Self {
        let policy = Policy::default();
        Self {
            clones: 1,
            device: Devices::Host,
            topology: Topology::Chain,
            tree_length: 2,
            tree_fanout: 2,
            chunk: Chunk::Auto,
            transport: Choice::Auto,
            allow: Vec::new(),
            verify: true,
            depth: u32::try_from(policy.depth).unwrap_or(2),
            stall: policy.stall,
            floor: ByteSize(0),
            floor_window: Duration::from_secs(10),
            repairs: policy.repairs,
            max_losses: policy.max_losses,
            pull_timeout: Duration::from_secs(60),
            import_timeout: Duration::from_secs(20),
            setup_timeout: Duration::from_secs(600),
            transfer_timeout: Duration::from_secs(600),
        }
    }
}

impl Replicate {
    /// The schedule these settings ask for.
    pub fn schedule(&self) -> Schedule {
        let clones = self.clones;
        match self.topology {
            Topology::Star => Schedule::Star { clones },
            Topology::Chain => Schedule::Chain { clones },
            Topology::Tree => {
                Schedule::Tree { clones, length: self.tree_length.max(1), fanout: self.tree_fanout.max(1) }
            }
        }
    }

    /// How fast a source has to be for a member with `above` members above it that do not hold all.
    pub(crate) fn floor(&self, above: u32) -> Option<Floor> {
        let window = crate::service::stall(self.floor_window, above);
        (self.floor.0 > 0).then_some(Floor { bytes_per_s: self.floor.0, window })
    }

    /// The limits these settings ask for.
    pub fn policy(&self) -> Policy {
        Policy {
            depth: usize::try_from(self.depth.max(1)).unwrap_or(1),
            stall: self.stall,
            repairs: self.repairs,
            max_losses: self.max_losses,
        }
    }
}

/// Who reads from whom.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Topology {
    /// Each clone from the one before.
    Chain,
    /// Each clone from the seed.
    Star,
    /// Chains whose heads form a tree.
    Tree,
}

impl fmt::Display for Topology {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Chain => "chain",
            Self::Star => "star",
            Self::Tree => "tree",
        })
    }
}

/// Why a text is no value of a setting.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NotASetting(String);

impl NotASetting {
    pub(crate) fn new(why: String) -> Self {
        Self(why)
    }
}

impl fmt::Display for NotASetting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for NotASetting {}

/// Bytes of one copy: `auto`, or a whole number of 16 MiB blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Chunk {
    /// Chosen from size and topology ([`flashboot_core::schedule::auto_chunk`]).
    Auto,
    /// This many bytes.
    Bytes(ByteSize),
}

impl FromStr for Chunk {
    type Err = NotASetting;

    fn from_str(text: &str) -> Result<Self, NotASetting> {
        if text == "auto" {
            return Ok(Self::Auto);
        }
        let size: ByteSize = text.parse().map_err(|e| NotASetting(format!("{e}, or `auto`")))?;
        if size.0 == 0 || !size.0.is_multiple_of(BLOCK) {
            let block = ByteSize(BLOCK);
            return Err(NotASetting(format!(
                "a chunk of {size} is not a whole number of {block} blocks: use {block}, {}, … or `auto`",
                ByteSize(2 * BLOCK)
            )));
        }
        Ok(Self::Bytes(size))
    }
}

impl fmt::Display for Chunk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.pad("auto"),
            Self::Bytes(size) => fmt::Display::fmt(size, f),
        }
    }
}

/// Whose memory arenas are in: `host`, `cuda:*`, or GPUs by number, UUID or PCI address.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Devices {
    /// Host memory.
    #[default]
    Host,
    /// Every GPU that is visible, in the driver's order.
    All,
    /// These, each as [`flashboot_cuda::Device::find`] reads it.
    These(Vec<String>),
}

impl FromStr for Devices {
    type Err = NotASetting;

    /// After `cuda:N` a number alone is another of the kind: `cuda:0,1`.
    fn from_str(text: &str) -> Result<Self, NotASetting> {
        match text {
            "host" => return Ok(Self::Host),
            "cuda:*" => return Ok(Self::All),
            _ => {}
        }
        let mut these: Vec<String> = Vec::new();
        for name in text.split(',').map(str::trim) {
            let number = |digits: &str| !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit());
            let after_number = these.last().is_some_and(|last| last.starts_with("cuda:"));
            these.push(match name {
                _ if number(name) && after_number => format!("cuda:{name}"),
                _ if name.strip_prefix("cuda:").is_some_and(number) => name.to_owned(),
                _ if name.starts_with("GPU-") => name.to_owned(),
                // A PCI address, in full or without its domain.
                _ if !name.starts_with("cuda:") && name.contains(':') && name.contains('.') => {
                    name.to_owned()
                }
                _ => {
                    return Err(NotASetting(format!(
                        "`{name}` is not a device: use host, cuda:*, cuda:0, cuda:0,1, GPU-… or a PCI address"
                    )));
                }
            });
        }
        Ok(Self::These(these))
    }
}

impl fmt::Display for Devices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.pad("host"),
            Self::All => f.pad("cuda:*"),
            Self::These(these) => f.pad(&these.join(",")),
        }
    }
}

/// Which transport: `auto`, or one by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Choice {
    /// The first of imex, ipc, rdma, tcp that works between the two.
    Auto,
    /// This one or an error.
    Only(TransportName),
}

/// Every transport by name, in `auto`'s order, and the mock.
pub const TRANSPORTS: [TransportName; 5] =
    [TransportName::Imex, TransportName::Ipc, TransportName::Rdma, TransportName::Tcp, TransportName::Mock];

/// The transport called `text`.
pub fn transport(text: &str) -> Result<TransportName, NotASetting> {
    TRANSPORTS
        .into_iter()
        .find(|name| name.as_str() == text)
        .ok_or_else(|| NotASetting(format!("`{text}` is not a transport: use imex, ipc, rdma, tcp or mock")))
}

impl FromStr for Choice {
    type Err = NotASetting;

    fn from_str(text: &str) -> Result<Self, NotASetting> {
        match text {
            "auto" => Ok(Self::Auto),
            name => transport(name).map(Self::Only).map_err(|_| {
                NotASetting(format!("`{name}` is not a transport: use auto, imex, ipc, rdma, tcp or mock"))
            }),
        }
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.pad("auto"),
            Self::Only(name) => fmt::Display::fmt(name, f),
        }
    }
}

/// Settings that are texts: serialised by `Display`, read by `FromStr`.
macro_rules! as_text {
    ($($name:ty: $expecting:literal),*) => {$(
        impl Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
                s.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
                text_or_number(d, $expecting)?.parse().map_err(serde::de::Error::custom)
            }
        }
    )*};
}

as_text!(
    Chunk: "`auto` or a size such as 256MiB",
    Choice: "`auto` or a transport's name",
    Devices: "`host`, `cuda:*` or GPUs such as cuda:0,1"
);

/// A text, or a number as text: a file and an environment may write `16777216` for `16MiB`.
pub(crate) fn text_or_number<'de, D: serde::Deserializer<'de>>(
    d: D,
    expecting: &'static str,
) -> Result<String, D::Error> {
    struct Visitor(&'static str);
    impl serde::de::Visitor<'_> for Visitor {
        type Value = String;
        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str(self.0)
        }
        fn visit_str<E: serde::de::Error>(self, v: &str) -> Result<String, E> {
            Ok(v.to_owned())
        }
        fn visit_u64<E: serde::de::Error>(self, v: u64) -> Result<String, E> {
            Ok(v.to_string())
        }
        fn visit_i64<E: serde::de::Error>(self, v: i64) -> Result<String, E> {
            Ok(v.to_string())
        }
    }
    d.deserialize_any(Visitor(expecting))
}

/// A list of transports.
fn names<'de, D: serde::Deserializer<'de>>(d: D) -> Result<Vec<TransportName>, D::Error> {
    listed(d, "a list of transports such as [\"ipc\", \"tcp\"] or \"ipc,tcp\"", transport)
}

/// A list of a load's sources.
fn sources<'de, D: serde::Deserializer<'de>>(d: D) -> Result<Vec<SourceKind>, D::Error> {
    listed(d, "a list of sources such as [\"peer\", \"image\"] or \"peer,image\"", str::parse)
}

/// A list of names, or one text with commas.
fn listed<'de, D: serde::Deserializer<'de>, T, E: fmt::Display>(
    d: D,
    expecting: &'static str,
    read: fn(&str) -> Result<T, E>,
) -> Result<Vec<T>, D::Error> {
    struct Visitor<T, E>(&'static str, fn(&str) -> Result<T, E>);
    impl<'de, T, E: fmt::Display> serde::de::Visitor<'de> for Visitor<T, E> {
        type Value = Vec<T>;
        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str(self.0)
        }
        fn visit_str<F: serde::de::Error>(self, v: &str) -> Result<Self::Value, F> {
            let names = v.split(',').map(str::trim).filter(|s| !s.is_empty());
            names.map(|s| self.1(s).map_err(F::custom)).collect()
        }
        fn visit_seq<A: serde::de::SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
            let mut found = Vec::new();
            while let Some(name) = seq.next_element::<String>()? {
                found.push(self.1(&name).map_err(serde::de::Error::custom)?);
            }
            Ok(found)
        }
    }
    d.deserialize_any(Visitor(expecting, read))
}

pub(crate) mod duration {
    use serde::{Deserializer, Serializer, de::Error as _};
    use std::time::Duration;

    pub(crate) fn serialize<S: Serializer>(d: &Duration, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(&humantime::format_duration(*d))
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<Duration, D::Error> {
        let text = super::text_or_number(d, "a duration such as 30s or 5m")?;
        humantime::parse_duration(&text)
            .map_err(|e| D::Error::custom(format!("`{text}` is not a duration such as 30s or 5m: {e}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunk_is_auto_or_whole_blocks() {
        assert_eq!("auto".parse(), Ok(Chunk::Auto));
        assert_eq!("32MiB".parse(), Ok(Chunk::Bytes(ByteSize::mib(32))));
        for bad in ["0", "1MiB", "17MiB", "17000000", "x", ""] {
            assert!(bad.parse::<Chunk>().is_err(), "{bad}");
        }
    }

    #[test]
    fn devices_are_host_all_or_a_list() {
        assert_eq!("host".parse(), Ok(Devices::Host));
        assert_eq!("cuda:*".parse(), Ok(Devices::All));
        let these =
            |names: &[&str]| Ok(Devices::These(names.iter().map(|name| (*name).to_owned()).collect()));
        assert_eq!("cuda:0,2, cuda:1".parse(), these(&["cuda:0", "cuda:2", "cuda:1"]));
        assert_eq!("GPU-ab,0000:1B:00.0".parse(), these(&["GPU-ab", "0000:1B:00.0"]));
        for bad in ["", "0", "cuda", "cuda:", "cuda:x", "cuda:0,", "GPU-ab,1", "host,cuda:0", "cuda:*,1"] {
            assert!(bad.parse::<Devices>().is_err(), "{bad}");
        }
    }

    #[test]
    fn every_setting_reads_back() {
        let config = Config {
            replicate: Replicate {
                chunk: Chunk::Bytes(ByteSize::mib(32)),
                allow: vec![TransportName::Ipc],
                device: Devices::These(vec!["cuda:0".into(), "GPU-ab".into()]),
                ..Replicate::default()
            },
            ..Config::default()
        };
        let json = serde_json::to_string(&config).unwrap();
        assert_eq!(serde_json::from_str::<Config>(&json).unwrap(), config);
    }

    #[test]
    fn unknown_keys_and_impossible_values_are_refused() {
        for bad in [
            r#"{"replicat":{}}"#,
            r#"{"replicate":{"clone":1}}"#,
            r#"{"replicate":{"clones":-1}}"#,
            r#"{"replicate":{"topology":"ring"}}"#,
            r#"{"replicate":{"stall":"soon"}}"#,
            r#"{"replicate":{"transport":"carrier-pigeon"}}"#,
            r#"{"replicate":{"allow":["ipc","x"]}}"#,
            r#"{"memory":{"pages":"large"}}"#,
        ] {
            assert!(serde_json::from_str::<Config>(bad).is_err(), "{bad}");
        }
        let listed: Config = serde_json::from_str(r#"{"replicate":{"allow":"ipc, tcp"}}"#).unwrap();
        assert_eq!(listed.replicate.allow, [TransportName::Ipc, TransportName::Tcp]);
    }
}
