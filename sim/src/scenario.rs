//! What is to be simulated: how much, for how many, in which shape.

use crate::{Error, Profile};
use flashboot_core::{
    BLOCK, Geometry,
    schedule::{ChunkCosts, Schedule, auto_chunk},
};
use flashboot_rendezvous::protocol::{Rules, chain};
use std::{fmt, time::Duration};

/// Processes of one simulation, at most: each has a machine and its lists.
const MEMBERS: u64 = 1 << 20;
/// Members that the replication service is asked about, at most: it looks at every member for every other.
const SERVED: u64 = 1 << 12;
/// Nodes of a gather, at most: each may read from every other.
const NODES: u32 = 1 << 10;
/// Copies in all, at most: a machine remembers 32 bytes of each.
const COPIES: u64 = 1 << 25;
/// Bytes that land in all, at most: so that they can be counted.
const BYTES: u128 = 1 << 62;
/// Copies that a timeline shows, at most.
const DRAWN: u64 = 1 << 20;

/// In which shape bytes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Topology {
    /// Every clone reads from its seed.
    Star,
    /// Each clone reads from the one before.
    Chain,
    /// Chains whose heads form a tree.
    Tree {
        /// Clones in one chain.
        length: u32,
        /// Chain heads that read from one chain head.
        fanout: u32,
    },
    /// As the replication service places clones that came together (`flashboot clone --expect N`).
    Placed,
    /// All-gather: `clones` nodes hold an equal part each, and read from their predecessors.
    Ring,
    /// All-gather, every part from its owner.
    Staggered,
    /// All-gather by ring, part by part.
    WholeChunkRing,
}

impl Topology {
    /// Whether nodes complete one another, instead of reading what a seed has.
    pub fn is_gather(self) -> bool {
        matches!(self, Self::Ring | Self::Staggered | Self::WholeChunkRing)
    }

    /// The schedule for `clones` clones of one seed; `None` where the service decides.
    pub fn schedule(self, clones: u32) -> Option<Schedule> {
        Some(match self {
            Self::Star => Schedule::Star { clones },
            Self::Chain => Schedule::Chain { clones },
            Self::Tree { length, fanout } => Schedule::Tree { clones, length, fanout },
            Self::Ring => Schedule::Ring { nodes: clones },
            Self::Staggered => Schedule::Staggered { nodes: clones },
            Self::WholeChunkRing => Schedule::WholeChunkRing { nodes: clones },
            Self::Placed => return None,
        })
    }

    /// Hops to the farthest clone of an image of `bytes`, for choosing a chunk.
    fn depth(self, clones: u32, bytes: u64) -> u32 {
        let placed = || clones.min(chain(bytes, Rules::default().least_chain));
        self.schedule(clones).map_or_else(placed, Schedule::depth)
    }
}

impl fmt::Display for Topology {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Star => f.write_str("star"),
            Self::Chain => f.write_str("chain"),
            Self::Tree { length, fanout } => write!(f, "tree of chains of {length}, fan-out {fanout}"),
            Self::Placed => f.write_str("placed"),
            Self::Ring => f.write_str("ring"),
            Self::Staggered => f.write_str("staggered"),
            Self::WholeChunkRing => f.write_str("whole-chunk-ring"),
        }
    }
}

/// Bytes of one copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Chunk {
    /// What `auto` chooses with the profile's costs.
    Auto,
    /// So many, a whole number of blocks.
    Bytes(u64),
    /// One copy for all of it (of a gather: for each part).
    Whole,
}

/// Clones that are slower than others.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Slow {
    /// The probability that a clone is one of them.
    pub share: f64,
    /// What is left of the rate of every link that it is at an end of.
    pub factor: f64,
}

/// One simulation.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Scenario {
    /// Bytes that each GPU is to hold.
    pub image: u64,
    /// Replicas to fill (of a gather: nodes).
    pub clones: u32,
    /// GPUs of a replica. Each has an image of its own, which goes from the same GPU of another replica.
    pub ranks: u32,
    /// Replicas that hold all from the start; the clones are dealt out to them evenly.
    pub seeds: u32,
    /// The shape.
    pub topology: Topology,
    /// Bytes of one copy.
    pub chunk: Chunk,
    /// Whether what lands is hashed before it counts.
    pub verify: bool,
    /// Pulls in flight at one clone.
    pub depth: u32,
    /// Replicas of one host; `None`: as many as have room.
    pub per_host: Option<u32>,
    /// The probability that a clone dies, at a moment drawn evenly from the time that all would take without deaths.
    pub fail: f64,
    /// Slower clones.
    pub slow: Option<Slow>,
    /// How unequal hops are: the standard deviation of a hop's rate, as a share of it. A hop is never faster than its link.
    pub uneven: f64,
    /// What draws depend on. One seed is one history.
    pub seed: u64,
    /// Whether the beginning and the end of every copy of the first 96 GPUs is kept.
    pub spans: bool,
}

impl Scenario {
    /// A chain of `clones` from one seed: `auto` chunks, verified where the profile can, two pulls in flight, no deaths.
    pub fn new(image: u64, clones: u32) -> Self {
        Self {
            image,
            clones,
            ranks: 1,
            seeds: 1,
            topology: Topology::Chain,
            chunk: Chunk::Auto,
            verify: true,
            depth: 2,
            per_host: None,
            fail: 0.0,
            slow: None,
            uneven: 0.0,
            seed: 1,
            spans: false,
        }
    }

    /// The most clones that one seed gets.
    pub(crate) fn clones_of_a_seed(&self) -> u32 {
        if self.topology.is_gather() || self.topology == Topology::Placed {
            return self.clones;
        }
        self.clones.div_ceil(self.seeds.max(1))
    }

    /// How the image is cut.
    ///
    /// # Errors
    /// [`Error::Geometry`] for a chunk that is no whole number of blocks; [`Error::Range`] for more copies than can be
    /// simulated.
    pub(crate) fn geometry(&self, profile: &Profile) -> Result<Geometry, Error> {
        let clones = self.clones_of_a_seed();
        let shards = self.topology.schedule(clones).map_or(1, Schedule::shards);
        // Blocks are dealt out to shards: the largest shard has one more than others.
        let shard = self.image.div_ceil(BLOCK).div_ceil(u64::from(shards.max(1))).max(1) * BLOCK;
        let chunk = match self.chunk {
            Chunk::Bytes(bytes) => bytes,
            Chunk::Whole => shard,
            Chunk::Auto => {
                let verify = self.verify && profile.gpu.hash.is_some();
                auto_chunk(shard, self.topology.depth(clones, self.image), verify, BLOCK, costs(profile))
            }
        };
        let geometry = Geometry::new(self.image, BLOCK, chunk, shards)?;
        self.fits(geometry)?;
        Ok(geometry)
    }

    /// Refuses more than memory and patience have room for: options that are possible one by one may not be together.
    fn fits(&self, geometry: Geometry) -> Result<(), Error> {
        let range = |option, given: String, possible| Err(Error::Range { option, given, possible });
        let replicas = u64::from(self.clones) * u64::from(self.ranks);
        let bytes = u128::from(self.image) * u128::from(replicas);
        if bytes > BYTES {
            return range("--image-size", format!("{bytes} bytes for all"), "at most 4 EiB for all clones");
        }
        let chunks = self.image.div_ceil(geometry.chunk()).saturating_add(u64::from(geometry.shards()));
        let copies = |members: u64| chunks.saturating_mul(members);
        if copies(replicas) > COPIES {
            let given = format!("{} bytes, {} copies in all", geometry.chunk(), copies(replicas));
            return range("--chunk", given, "at most 33554432 copies in all: larger chunks, or fewer clones");
        }
        let drawn = copies(replicas.min(crate::svg::ROWS as u64));
        if self.spans && drawn > DRAWN {
            return range("--svg", format!("a picture of {drawn} copies"), "at most 1048576");
        }
        Ok(())
    }

    /// # Errors
    /// [`Error::Range`] for the first option that cannot be.
    pub(crate) fn check(&self) -> Result<(), Error> {
        let range = |option, given: String, possible| Err(Error::Range { option, given, possible });
        let count = |option, given: u32, most: u32, possible| match given {
            0 => range(option, given.to_string(), possible),
            given if given > most => range(option, given.to_string(), possible),
            _ => Ok(()),
        };
        if self.image == 0 || self.image > 1 << 50 {
            return range("--image-size", self.image.to_string(), "from 1 byte to 1024TiB");
        }
        let nodes = if self.topology.is_gather() { NODES } else { 1 << 20 };
        let possible = "between 1 and 1048576, and 1024 nodes of a gather";
        count("--clones", self.clones, nodes, possible)?;
        count("--ranks", self.ranks, 4096, "between 1 and 4096")?;
        count("--depth", self.depth, 64, "between 1 and 64")?;
        count("--seeds", self.seeds, self.clones, "between 1 and the number of clones")?;
        let members = (u64::from(self.clones) + u64::from(self.seeds)) * u64::from(self.ranks);
        if members > MEMBERS {
            let given = format!("{} of {} ranks", self.clones, self.ranks);
            return range("--clones", given, "at most 1048576 GPUs of clones and seeds together");
        }
        let served = self.topology == Topology::Placed || self.fail > 0.0;
        if served && members > SERVED {
            let given = format!("{} of {} ranks", self.clones, self.ranks);
            return range(
                "--clones",
                given,
                "at most 4096 GPUs where the replication service decides or clones die",
            );
        }
        if let Some(per_host) = self.per_host {
            count("--per-host", per_host, 1 << 20, "between 1 and 1048576")?;
        }
        if let Topology::Tree { length, fanout } = self.topology {
            count("--tree-length", length, 1 << 20, "between 1 and 1048576")?;
            count("--tree-fanout", fanout, 1 << 20, "between 1 and 1048576")?;
        }
        if !(0.0..=1.0).contains(&self.fail) {
            return range("--fail", self.fail.to_string(), "a probability from 0 to 1");
        }
        if self.fail > 0.0 && self.topology.is_gather() {
            let possible = "0 for an all-gather: how its nodes go on after a death is not modelled";
            return range("--fail", self.fail.to_string(), possible);
        }
        if !(0.0..=1.0).contains(&self.uneven) {
            return range("--uneven", self.uneven.to_string(), "a share from 0 to 1");
        }
        if let Some(Slow { share, factor }) = self.slow
            && !((0.0..=1.0).contains(&share) && (0.001..=1.0).contains(&factor))
        {
            let given = format!("{share} by {factor}");
            return range("--slow", given, "a probability from 0 to 1, and a factor from 0.001 to 1");
        }
        Ok(())
    }
}

/// What a chunk costs by the profile, at the link by which most is read there.
fn costs(profile: &Profile) -> ChunkCosts {
    let shape = profile.shape;
    let nvlink = profile.nvlink.as_ref().filter(|_| shape.gpus_per_host > 1 || shape.hosts > 1);
    let network =
        profile.network.as_ref().map(|network| &network.copy).filter(|_| shape.hosts_per_domain == 1);
    let Some(copy) = network.or(nvlink).or(profile.local.as_ref()) else { return ChunkCosts::NVLINK };
    // Who waits for a chunk waits for a turn too.
    let turn = profile.gpu.turns.map_or(0.0, |turns| turns.change_us);
    // A curve is taken at its end: chunks are large.
    let beyond = copy.curve.as_ref().map_or(0, |curve| curve.beyond(u64::MAX, copy.rate));
    let micros = copy.chunk_us + copy.look_us + turn + beyond as f64 / 1e3;
    ChunkCosts {
        per_chunk: Duration::from_nanos((micros * 1e3) as u64),
        rate: copy.rate * profile.gpu.duplex,
        check_behind: profile.gpu.turns.is_none(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_papers_case_gets_the_papers_chunk() {
        let profile = Profile::built_in("gb300").unwrap();
        let scenario = Scenario { verify: false, ..Scenario::new(41_400_000_000, 8) };
        assert_eq!(scenario.geometry(&profile).unwrap().chunk(), 256 << 20);
    }

    #[test]
    fn what_cannot_be_is_refused_by_the_options_name() {
        let good = Scenario::new(1 << 30, 4);
        for (bad, named) in [
            (Scenario { image: 0, ..good }, "--image-size"),
            (Scenario { clones: 0, ..good }, "--clones"),
            (Scenario { clones: 5000, topology: Topology::Ring, ..good }, "--clones"),
            (Scenario { seeds: 5, ..good }, "--seeds"),
            (Scenario { depth: 0, ..good }, "--depth"),
            (Scenario { ranks: 0, ..good }, "--ranks"),
            (Scenario { per_host: Some(0), ..good }, "--per-host"),
            (Scenario { topology: Topology::Tree { length: 0, fanout: 2 }, ..good }, "--tree-length"),
            (Scenario { clones: 1 << 20, ranks: 2, ..good }, "--clones"),
            (Scenario { clones: 1 << 12, topology: Topology::Placed, ..good }, "--clones"),
            (Scenario { clones: 1 << 12, fail: 0.1, ..good }, "--clones"),
            (Scenario { topology: Topology::Staggered, fail: 0.1, ..good }, "--fail"),
            (Scenario { fail: f64::NAN, ..good }, "--fail"),
            (Scenario { slow: Some(Slow { share: 0.1, factor: 0.0 }), ..good }, "--slow"),
        ] {
            let Err(Error::Range { option, .. }) = bad.check() else { panic!("{named} was taken") };
            assert_eq!(option, named);
        }
        assert_eq!(good.check(), Ok(()));
        let profile = Profile::built_in("gb300").unwrap();
        let odd = Scenario { chunk: Chunk::Bytes(1000), ..good };
        assert!(matches!(odd.geometry(&profile), Err(Error::Geometry(_))));
    }

    #[test]
    fn options_that_are_possible_one_by_one_are_refused_together() {
        let profile = Profile::built_in("h100-roce").unwrap();
        let huge = Scenario { chunk: Chunk::Bytes(BLOCK), ..Scenario::new(1 << 50, 8) };
        let whole = Scenario { chunk: Chunk::Whole, ..Scenario::new(1 << 50, 16_000) };
        let drawn = Scenario { spans: true, chunk: Chunk::Bytes(BLOCK), ..Scenario::new(BLOCK << 20, 1) };
        for (bad, named) in [
            (huge, "--chunk"),
            (Scenario { clones: 16_000, image: 1 << 47, ..huge }, "--chunk"),
            (whole, "--image-size"),
            (drawn, "--svg"),
        ] {
            assert_eq!(bad.check(), Ok(()));
            let Err(Error::Range { option, .. }) = bad.geometry(&profile) else {
                panic!("{named} was taken")
            };
            assert_eq!(option, named);
        }
        assert!(Scenario { spans: false, ..drawn }.geometry(&profile).is_ok());
        let fleet =
            Scenario { ranks: 8, chunk: Chunk::Bytes(256 << 20), ..Scenario::new(217_000_000_000, 1250) };
        assert!(fleet.geometry(&profile).is_ok());
    }
}
