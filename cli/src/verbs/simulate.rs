//! `flashboot simulate`: what a replication would take on a modelled machine.

use crate::{
    exit::{Code, Failure},
    human,
    output::Output,
    table::{Side, Table},
};
use clap::{Args, ValueEnum};
use flashboot_core::{ByteSize, Error as CoreError, Kind};
use flashboot_sim::{
    Chunk, Error, Filled, Load, Loaded, Outcome, Point, Profile, Scenario, Slow, Sweep, Topology, curves,
    load, simulate, sweep, timeline,
};
use serde_json::{Value, json};
use std::{
    fmt::Write as _,
    fs,
    io::Read as _,
    path::{Path, PathBuf},
    str::FromStr,
};

/// The longest profile file that is read.
const PROFILE_BYTES: u64 = 1 << 20;
/// Clones that are listed for people.
const LISTED: usize = 24;

/// What `simulate` and `advise` share.
#[derive(Debug, Args)]
pub(super) struct Machine {
    /// gb300, h200, h200x2, h100-roce, racks8, or a .toml file of one's own
    #[arg(short, long, value_name = "NAME|FILE")]
    profile: String,
    /// Bytes that each GPU is to hold
    #[arg(short = 's', long, value_name = "SIZE")]
    image_size: ByteSize,
    /// Replicas to fill (of an all-gather: nodes)
    #[arg(short = 'n', long, value_name = "N", default_value_t = 8)]
    clones: u32,
    /// GPUs of a replica; each takes its image from the same GPU of another
    #[arg(long, value_name = "N", default_value_t = 1)]
    ranks: u32,
    /// Replicas of one host [default: as many as have room]
    #[arg(long, value_name = "N")]
    per_host: Option<u32>,
    /// Do not hash what lands
    #[arg(long)]
    no_verify: bool,
    /// Pulls in flight at one clone
    #[arg(long, value_name = "N", default_value_t = 2)]
    depth: u32,
    /// The probability that a clone dies on the way
    #[arg(long, value_name = "P", default_value_t = 0.0)]
    fail: f64,
    /// The probability that a clone is slow, and what is left of its links' rate, as 0.05x0.5
    #[arg(long, value_name = "PxF", value_parser = slow)]
    slow: Option<Slow>,
    /// What draws depend on: one seed is one history
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
}

fn slow(text: &str) -> Result<Slow, String> {
    let numbers = text
        .split_once('x')
        .and_then(|(share, factor)| Some(Slow { share: share.parse().ok()?, factor: factor.parse().ok()? }));
    numbers.ok_or_else(|| format!("`{text}` is not a probability and a factor: write 0.05x0.5"))
}

impl Machine {
    pub(super) fn profile(&self) -> Result<Profile, Failure> {
        if Profile::names().any(|name| name == self.profile) || !self.profile.ends_with(".toml") {
            return Profile::built_in(&self.profile).map_err(failure);
        }
        let path = Path::new(&self.profile);
        let io = |e: std::io::Error| CoreError::from_io("read", &e, &self.profile);
        // What is no file may have no end, or never begin.
        if !fs::metadata(path).map_err(io)?.is_file() {
            return Err(Failure::usage(format!("{}: a profile is a file", self.profile)));
        }
        let mut text = String::new();
        fs::File::open(path)
            .and_then(|file| file.take(PROFILE_BYTES + 1).read_to_string(&mut text))
            .map_err(io)?;
        if text.len() as u64 > PROFILE_BYTES {
            return Err(Failure::usage(format!("{}: more than 1 MiB is no profile", self.profile)));
        }
        Profile::parse(&self.profile, &text).map_err(failure)
    }

    pub(super) fn scenario(&self) -> Scenario {
        Scenario {
            ranks: self.ranks,
            per_host: self.per_host,
            verify: !self.no_verify,
            depth: self.depth,
            fail: self.fail,
            slow: self.slow,
            seed: self.seed,
            ..Scenario::new(self.image_size.0, self.clones)
        }
    }
}

pub(super) fn failure(e: Error) -> Failure {
    Failure::from(CoreError::from(e))
}

/// `unvalidated`, or against what.
pub(super) fn validation(profile: &Profile) -> String {
    match &profile.validated {
        Some(by) => format!("validated against {by}"),
        None => "unvalidated: the profile was held against no measurement".into(),
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Shape {
    Star,
    Chain,
    Tree,
    /// As the replication service places clones
    Placed,
    Ring,
    Staggered,
    WholeChunkRing,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ChunkArg(Chunk);

impl FromStr for ChunkArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Ok(Self(match text {
            "auto" => Chunk::Auto,
            "whole" => Chunk::Whole,
            size => Chunk::Bytes(size.parse::<ByteSize>().map_err(|e| e.to_string())?.0),
        }))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Varied {
    Chunk,
    Clones,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum From {
    Disk,
    Staged,
}

#[derive(Debug, Args)]
pub(crate) struct SimulateArgs {
    #[command(flatten)]
    machine: Machine,
    #[arg(short, long, value_enum, default_value_t = Shape::Chain)]
    topology: Shape,
    /// Clones in one chain of a tree [default: 16]
    #[arg(long, value_name = "N")]
    tree_length: Option<u32>,
    /// Chain heads that read from one chain head of a tree [default: 2]
    #[arg(long, value_name = "N")]
    tree_fanout: Option<u32>,
    /// Bytes of one copy, a whole number of 16MiB blocks, auto, or whole [default: auto]
    #[arg(short, long, value_name = "auto|whole|SIZE")]
    chunk: Option<ChunkArg>,
    /// Replicas that hold all from the start; the clones are dealt out to them [default: 1]
    #[arg(long, value_name = "N")]
    seeds: Option<u32>,
    /// How unequal hops are: the standard deviation of a hop's rate, as a share of it
    #[arg(long, value_name = "SHARE", default_value_t = 0.0)]
    uneven: f64,
    /// Of an all-gather: also bring each node's part from disk or host memory into its GPUs
    #[arg(long, value_enum)]
    load: Option<From>,
    /// Run it for many chunks, or for many numbers of clones
    #[arg(long, value_enum)]
    sweep: Option<Varied>,
    /// Write a picture: who copied when; with --sweep, times over what is varied
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

impl SimulateArgs {
    /// Refuses options that the shape has no use for.
    fn check(&self) -> Result<(), Failure> {
        let tree = self.topology == Shape::Tree;
        if !tree && (self.tree_length.is_some() || self.tree_fanout.is_some()) {
            return Err(Failure::usage("--tree-length and --tree-fanout are for --topology tree"));
        }
        let gather = matches!(self.topology, Shape::Ring | Shape::Staggered | Shape::WholeChunkRing);
        if gather && self.seeds.is_some() {
            return Err(Failure::usage(
                "--seeds is for broadcasts: nodes of an all-gather complete one another",
            ));
        }
        if self.sweep == Some(Varied::Chunk) && self.chunk.is_some() {
            return Err(Failure::usage("--sweep chunk tries chunks of its own: leave --chunk out"));
        }
        Ok(())
    }

    fn scenario(&self) -> Scenario {
        let (length, fanout) = (self.tree_length.unwrap_or(16), self.tree_fanout.unwrap_or(2));
        Scenario {
            topology: match self.topology {
                Shape::Star => Topology::Star,
                Shape::Chain => Topology::Chain,
                Shape::Tree => Topology::Tree { length, fanout },
                Shape::Placed => Topology::Placed,
                Shape::Ring => Topology::Ring,
                Shape::Staggered => Topology::Staggered,
                Shape::WholeChunkRing => Topology::WholeChunkRing,
            },
            chunk: self.chunk.map_or(Chunk::Auto, |chunk| chunk.0),
            seeds: self.seeds.unwrap_or(1),
            uneven: self.uneven,
            spans: self.svg.is_some() && self.sweep.is_none(),
            ..self.machine.scenario()
        }
    }
}

pub(crate) fn run(args: &SimulateArgs, output: Output) -> Result<Code, Failure> {
    args.check()?;
    let profile = args.machine.profile()?;
    let scenario = args.scenario();
    let loaded = args.load.map(|from| loads(&profile, &scenario, from)).transpose()?;
    let Some(varied) = args.sweep else {
        let outcome = simulate(&profile, &scenario).map_err(failure)?;
        picture(args, || timeline(&outcome))?;
        let filled = filled(&outcome)?;
        let mut object = object(&profile, &scenario, &outcome, filled);
        if let (Some(loaded), Some(object)) = (&loaded, object.as_object_mut()) {
            object.insert("load".into(), json!(loaded));
        }
        output.result(&object, || text(&profile, &scenario, &outcome, filled, loaded.as_ref()))?;
        return Ok(Code::SUCCESS);
    };
    let varied = match varied {
        Varied::Chunk => Sweep::Chunk,
        Varied::Clones => Sweep::Clones,
    };
    let points = sweep(&profile, &scenario, varied).map_err(failure)?;
    picture(args, || curves(&points, varied))?;
    swept(&profile, &scenario, &points, varied, output)
}

fn picture(args: &SimulateArgs, draw: impl FnOnce() -> String) -> Result<(), Failure> {
    let Some(path) = &args.svg else { return Ok(()) };
    fs::write(path, draw()).map_err(|e| CoreError::from_io("write", &e, path.display().to_string()).into())
}

fn loads(profile: &Profile, scenario: &Scenario, from: From) -> Result<Loaded, Failure> {
    if !scenario.topology.is_gather() {
        return Err(Failure::usage(
            "--load is for ring, staggered and whole-chunk-ring: clones load nothing",
        ));
    }
    let bytes = scenario.image.div_ceil(u64::from(scenario.clones.max(1)));
    let load_of = Load { bytes, gpus_per_host: scenario.ranks, disk: from == From::Disk };
    load(profile, &load_of).map_err(failure)
}

fn filled(outcome: &Outcome) -> Result<Filled, Failure> {
    outcome.filled().ok_or_else(|| {
        let why = outcome.failed.first().map_or("every one of them died", |(_, why)| why);
        CoreError::new(Kind::SourceLost, "simulate", format!("no clone has everything: {why}")).into()
    })
}

fn object(profile: &Profile, scenario: &Scenario, outcome: &Outcome, filled: Filled) -> Value {
    json!({
        "profile": profile.name,
        "validated": profile.validated,
        "topology": scenario.topology.to_string(),
        "seeds": scenario.seeds,
        "image_bytes": outcome.image,
        "chunk_bytes": outcome.chunk,
        "chunks": outcome.chunks,
        "first_ms": filled.first_ms,
        "last_ms": filled.last_ms,
        "mean_ms": filled.mean_ms,
        "map_ms": outcome.map_ms,
        "clones": outcome.clones,
        "dead": outcome.dead,
        "failed": outcome.failed,
        "moves": outcome.moves,
        "links": outcome.links,
    })
}

fn text(
    profile: &Profile,
    scenario: &Scenario,
    outcome: &Outcome,
    filled: Filled,
    loaded: Option<&Loaded>,
) -> String {
    let mut text = format!(
        "{}: {}\n{}\n\n{} to {} by {} in chunks of {}, {}\nfirst {}, last {}, mean {} (mapped before: {})\n",
        profile.name,
        profile.about,
        validation(profile),
        human::bytes(outcome.image),
        human::count(u64::from(scenario.clones), "clone"),
        scenario.topology,
        ByteSize(outcome.chunk),
        human::count(u64::from(scenario.seeds), "seed"),
        human::ms(filled.first_ms),
        human::ms(filled.last_ms),
        human::ms(filled.mean_ms),
        human::ms(outcome.map_ms),
    );
    if let Some(Loaded { read_ms, pin_ms, h2d_ms }) = loaded {
        let parts = [read_ms, pin_ms, h2d_ms].map(|ms| human::ms(*ms));
        let _ =
            writeln!(text, "before that: read {}, pin {}, host to device {}", parts[0], parts[1], parts[2]);
    }
    if !outcome.dead.is_empty() || !outcome.failed.is_empty() {
        let _ = writeln!(
            text,
            "{} died, {} gave up, {} went on elsewhere",
            outcome.dead.len(),
            outcome.failed.len(),
            outcome.moves
        );
    }
    let mut table = Table::new(&[("clone", Side::Right), ("ready", Side::Right), ("rate", Side::Right)]);
    for clone in outcome.clones.iter().take(LISTED) {
        table.row(vec![clone.index.to_string(), human::ms(clone.ms), human::rate(clone.bytes_per_s)]);
    }
    text += "\n";
    text += &table.render();
    if outcome.clones.len() > LISTED {
        let _ = writeln!(text, "… and {} more (all of them: --json)", outcome.clones.len() - LISTED);
    }
    let mut table = Table::new(&[("link", Side::Left), ("carried", Side::Right), ("used", Side::Right)]);
    for link in outcome.links.iter().take(4) {
        let used = format!("{:.0} %", link.used * 100.0);
        table.row(vec![link.link.clone(), human::bytes(link.bytes), used]);
    }
    text + "\n" + &table.render()
}

fn swept(
    profile: &Profile,
    scenario: &Scenario,
    points: &[Point],
    varied: Sweep,
    output: Output,
) -> Result<Code, Failure> {
    let all: Vec<(&Point, Filled)> =
        points.iter().map(|p| Ok((p, filled(&p.outcome)?))).collect::<Result<_, Failure>>()?;
    // Of chunks the quickest, of numbers of clones the one that was asked for.
    let shown = match varied {
        Sweep::Chunk => all.iter().min_by(|a, b| a.1.last_ms.total_cmp(&b.1.last_ms)),
        Sweep::Clones => all.last(),
    };
    let Some((point, of_it)) = shown else { return Err(Failure::usage("there is nothing to sweep")) };
    let mut object = object(profile, scenario, &point.outcome, *of_it);
    let list = all.iter().map(|(p, f)| {
        json!({"chunk_bytes": p.chunk, "clones": p.clones, "first_ms": f.first_ms, "last_ms": f.last_ms, "mean_ms": f.mean_ms})
    });
    if let Some(object) = object.as_object_mut() {
        object.insert("points".into(), list.collect());
    }
    output.result(&object, || {
        let head = [
            ("chunk", Side::Right),
            ("clones", Side::Right),
            ("first", Side::Right),
            ("last", Side::Right),
            ("mean", Side::Right),
            ("", Side::Left),
        ];
        let mut table = Table::new(&head);
        for (p, f) in &all {
            let best = varied == Sweep::Chunk && p.chunk == point.chunk;
            table.row(vec![
                ByteSize(p.chunk).to_string(),
                p.clones.to_string(),
                human::ms(f.first_ms),
                human::ms(f.last_ms),
                human::ms(f.mean_ms),
                if best { "◀ last soonest".into() } else { String::new() },
            ]);
        }
        format!("{}: {}\n{}\n\n{}", profile.name, profile.about, validation(profile), table.render())
    })?;
    Ok(Code::SUCCESS)
}
