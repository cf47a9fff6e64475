//! Where one rank's bytes can come from, in order, and going on elsewhere when one fails in the middle.
//!
//! A source that has not what is wanted is skipped before anything moves; one that fails later is left, and the next one
//! fills what is still missing. Each is logged with its reason and counted: nothing is silently slow.

mod checkpoint;
mod image;
mod object;
mod report;

pub(crate) use checkpoint::open_as;
pub use checkpoint::{CheckpointSource, PlanProducer};
pub(crate) use image::fill_from;
pub use image::{FileProducer, ImageSource};
pub use object::{ObjectConfig, ObjectImage, ObjectSource};
pub use report::{LoadReport, Skip, SourceKind, Used};

use crate::pipeline::{FillConfig, Filling, Leftover, Phase, Phases, Proof};
use flashboot_core::{Arena, Error, Kind, Result, Retry};
use std::{
    fmt,
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

/// What is to be loaded.
#[derive(Debug, Clone)]
pub struct Wanted {
    /// The image's id, where there is an image.
    pub image: Option<String>,
    /// The rank image's name (`target-0-0-0-0`).
    pub rank: String,
    /// Payload bytes.
    pub payload: u64,
    /// What proves every block; a stock checkpoint alone has nothing.
    pub digests: Proof,
}

/// Makes the arena, once somebody wants to fill one.
type MakeArena = Box<dyn Fn() -> Result<Arc<dyn Arena>> + Send + Sync>;

/// One load: what is wanted, the arena that is filled, and what it took.
pub struct Load {
    wanted: Wanted,
    make: MakeArena,
    filling: OnceLock<Arc<Filling>>,
    making: Mutex<()>,
    phases: Phases,
    config: FillConfig,
    leftovers: Mutex<Vec<Leftover>>,
    /// Somebody else may still write to the arena: it is nobody's any more.
    forsaken: AtomicBool,
}

/// What a source did.
#[derive(Debug)]
pub enum Delivered {
    /// An arena that holds all of it already, and that nobody has to fill.
    Arena(Arc<dyn Arena>),
    /// The load's own arena has been filled.
    Filled,
}

/// One place that may have what is wanted. Its calls block.
pub trait Source: Send + Sync {
    /// Which kind of place.
    fn kind(&self) -> SourceKind;

    /// For logs: a path, a URL, a socket.
    fn name(&self) -> String;

    /// Whether it has what is wanted. Nothing moves.
    ///
    /// # Errors
    /// Why it is passed over.
    fn probe(&self, load: &Load) -> Result<()>;

    /// Delivers what is missing. What it has verified before it fails stays.
    ///
    /// # Errors
    /// Why the next source goes on.
    fn deliver(&self, load: &Load) -> Result<Delivered>;
}

impl Load {
    /// A load of `wanted` into the arena that `make` makes at the first need.
    pub fn new(
        wanted: Wanted,
        config: FillConfig,
        make: impl Fn() -> Result<Arc<dyn Arena>> + Send + Sync + 'static,
    ) -> Self {
        Self {
            wanted,
            make: Box::new(make),
            filling: OnceLock::new(),
            making: Mutex::new(()),
            phases: Phases::default(),
            config,
            leftovers: Mutex::default(),
            forsaken: AtomicBool::new(false),
        }
    }

    /// Ends the load with the error of the source that says so: what was asked to write to the arena may do so still, so no
    /// other source may.
    pub fn forsake(&self) {
        self.forsaken.store(true, Ordering::Relaxed);
    }

    /// Whether [`forsake`](Self::forsake) was called.
    pub fn is_forsaken(&self) -> bool {
        self.forsaken.load(Ordering::Relaxed)
    }

    /// What is wanted.
    pub fn wanted(&self) -> &Wanted {
        &self.wanted
    }

    /// How it is filled.
    pub fn config(&self) -> &FillConfig {
        &self.config
    }

    /// Where its time goes.
    pub fn phases(&self) -> &Phases {
        &self.phases
    }

    /// The arena, and what of it is there; made at the first call.
    ///
    /// # Errors
    /// The arena's own, and [`Kind::Mismatch`] for one of another length.
    pub fn filling(&self) -> Result<&Arc<Filling>> {
        let _making = self.making.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(filling) = self.filling.get() {
            return Ok(filling);
        }
        let arena = self.phases.time(Phase::Bind, || (self.make)())?;
        if arena.payload() != self.wanted.payload {
            let detail = format!("an arena of {} bytes for {}", arena.payload(), self.wanted.payload);
            return Err(Error::new(Kind::Mismatch, "load", detail));
        }
        let filling = Arc::new(Filling::new(arena, self.wanted.digests.clone())?);
        Ok(self.filling.get_or_init(|| filling))
    }

    /// Bytes that are there: how far it is.
    pub fn bytes(&self) -> u64 {
        self.filling.get().map_or(0, |filling| filling.bytes())
    }

    /// Keeps what a source has pinned until [`settle`](Self::settle), or the load's end.
    pub(crate) fn leave(&self, leftover: Leftover) {
        self.leftovers.lock().unwrap_or_else(PoisonError::into_inner).push(leftover);
    }

    /// Unpins what sources have pinned, and accounts for it. The arena is good before: whoever only wants the bytes need not
    /// wait for this, and whoever drops the load does it too.
    pub fn settle(&self) {
        let leftovers = std::mem::take(&mut *self.leftovers.lock().unwrap_or_else(PoisonError::into_inner));
        leftovers.into_iter().for_each(|leftover| leftover.unpin(&self.phases));
    }

    /// Loads from the first of `sources` that can, and from the next ones what it leaves.
    ///
    /// # Errors
    /// When none is left: the only one's own error, or the last reason that is not just an absence with all of them in its text. At once when another source
    /// cannot help: [`Kind::ContextLost`], [`Kind::Cancelled`], or no memory for the arena.
    pub fn run(&self, sources: &[Box<dyn Source>]) -> Result<(Arc<dyn Arena>, LoadReport)> {
        let began = Instant::now();
        let mut report = LoadReport { verified: self.wanted.digests.is_some(), ..LoadReport::default() };
        let mut worst: Option<Error> = None;
        for source in sources {
            let (kind, name, before, start) = (source.kind(), source.name(), self.bytes(), Instant::now());
            let delivered = source.probe(self).and_then(|()| source.deliver(self));
            let moved = self.bytes().saturating_sub(before);
            let done = delivered.and_then(|delivered| match delivered {
                Delivered::Filled if !self.filling()?.is_complete() => {
                    let missing: u64 = self.filling()?.missing().iter().map(|range| range.len()).sum();
                    let detail = format!("{kind} {name}: {missing} bytes are still missing");
                    Err(Error::new(Kind::SourceLost, "load", detail))
                }
                delivered => Ok(delivered),
            });
            if moved > 0 || done.is_ok() {
                report.used.push(Used {
                    kind,
                    name: name.clone(),
                    bytes: moved,
                    ms: start.elapsed().as_secs_f64() * 1e3,
                });
            }
            match done {
                Ok(delivered) => {
                    report.source = Some(kind);
                    report.ms = began.elapsed().as_secs_f64() * 1e3;
                    report.phases = self.phases.ms();
                    let arena = match delivered {
                        Delivered::Arena(arena) => arena,
                        Delivered::Filled => Arc::clone(self.filling()?.arena()),
                    };
                    tracing::info!(source = %kind, name, bytes = self.wanted.payload, ms = report.ms, "loaded");
                    return Ok((arena, report));
                }
                Err(error) => {
                    let failover = moved > 0;
                    tracing::warn!(source = %kind, name, bytes = moved, %error, "{}",
                        if failover { "a source failed in the middle; the next goes on" } else { "a source is passed over" });
                    let over = error.retry() == Retry::NewProcess
                        || error.kind() == Kind::Cancelled
                        || self.is_forsaken();
                    report.skips.push(Skip::new(kind, name, failover, &error));
                    if over {
                        return Err(error);
                    }
                    let absent = error.kind() == Kind::Unavailable;
                    if worst.as_ref().is_none_or(|worst| worst.kind() == Kind::Unavailable || !absent) {
                        worst = Some(error);
                    }
                }
            }
        }
        Err(self.nowhere(&report, worst))
    }

    fn nowhere(&self, report: &LoadReport, worst: Option<Error>) -> Error {
        // The only one's own words say most.
        if let (1, Some(only)) = (report.skips.len(), &worst) {
            return only.clone();
        }
        let all: Vec<_> =
            report.skips.iter().map(|skip| format!("{} {}: {}", skip.kind, skip.name, skip.reason)).collect();
        let kind = worst.as_ref().map_or(Kind::Invalid, Error::kind);
        let said = match all.as_slice() {
            [] => "no source was named".to_owned(),
            all => format!("no source has {}: {}", self.wanted.rank, all.join("; ")),
        };
        let mut error = Error::new(kind, "load", said);
        if let Some(code) = worst.as_ref().and_then(Error::code) {
            error = error.with_code(code);
        }
        match worst.as_ref().and_then(Error::remedy) {
            Some(remedy) => error.with_remedy(remedy),
            None => error,
        }
    }
}

impl fmt::Debug for Load {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Load")
            .field("wanted", &self.wanted)
            .field("filling", &self.filling)
            .finish_non_exhaustive()
    }
}
