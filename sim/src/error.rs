//! Why something cannot be simulated.

use flashboot_core::{GeometryError, Kind};

/// What is wrong with a profile or a scenario.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Error {
    /// No built-in profile has this name.
    #[error("`{name}` is no profile: use {known}, or the path of a .toml file")]
    UnknownProfile {
        /// What was asked for.
        name: String,
        /// Those that there are.
        known: String,
    },
    /// A profile does not parse, or a number in it is impossible.
    #[error("profile {name}: {detail}")]
    Profile {
        /// Which.
        name: String,
        /// What, where.
        detail: String,
    },
    /// More GPUs are asked for than the profile has.
    #[error("{wanted} GPUs are needed, profile {profile} has {has}")]
    Room {
        /// Which profile.
        profile: String,
        /// Seeds and clones together.
        wanted: u64,
        /// All GPUs of the profile.
        has: u64,
    },
    /// An option is out of its range.
    #[error("{option} is {given}: {possible}")]
    Range {
        /// The option as people give it.
        option: &'static str,
        /// Its value.
        given: String,
        /// What is possible.
        possible: &'static str,
    },
    /// No clone is left that could have everything.
    #[error("no clone has everything: {why}")]
    Lost {
        /// Why one of them gave up, or that all died.
        why: String,
    },
    /// The chunk does not cut the image.
    #[error(transparent)]
    Geometry(#[from] GeometryError),
    /// Between the two places the profile knows no link.
    #[error("profile {profile} has no {link}, over which GPU {reader} would read from GPU {source_gpu}")]
    NoLink {
        /// Which profile.
        profile: String,
        /// Which link.
        link: &'static str,
        /// Number of the reader's GPU.
        reader: u32,
        /// Number of the source's GPU.
        source_gpu: u32,
    },
    /// It would take longer than the clock counts, or more turns than can be simulated.
    #[error(
        "on profile {profile} the clones are not done in 18 years or 1048576 turns of its GPUs: it is too slow for so large an image"
    )]
    Endless {
        /// Which profile.
        profile: String,
    },
    /// The replication service refused what a member said.
    #[error("the replication service refused a simulated member: {0}")]
    Placement(String),
    /// Events ended, or went on without end, before every clone was done: a defect.
    #[error("the simulation stopped at {at_ms} ms with {left} clones neither done nor lost: {why}")]
    Stuck {
        /// Virtual milliseconds.
        at_ms: u64,
        /// Clones left.
        left: u64,
        /// What stopped it.
        why: String,
    },
}

impl From<Error> for flashboot_core::Error {
    fn from(e: Error) -> Self {
        let kind = match e {
            Error::Stuck { .. } | Error::Placement(_) => Kind::Protocol,
            Error::Lost { .. } => Kind::SourceLost,
            _ => Kind::Invalid,
        };
        Self::new(kind, "simulate", e.to_string())
    }
}
